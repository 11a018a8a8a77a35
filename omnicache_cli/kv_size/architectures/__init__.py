"""How each model architecture of vLLM builds its caching layers, by family.

`table` maps the name in the config's `architectures` to a family; a family reads the fields that
vLLM's model code reads and returns layers. Knows no options and no bytes.
"""
