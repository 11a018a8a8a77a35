"""A recorded run in the forms of other tools: a timeline for Perfetto, tables as Parquet or CSV.

Reads runs through `trace`, and samples of py-spy that lie beside them. Knows no engine and judges
nothing.
"""
