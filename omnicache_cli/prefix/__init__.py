"""Why a prefix hit ended where it did: vLLM's lookup, done again over what a run recorded.

Pure: reads the records and the reader of `trace`, and knows no vLLM. `lookup` is the rule, `ledger`
what the cache held at each moment, `case` finds the reasons of one lookup, `differences` and
`groups` the evidence.
"""
