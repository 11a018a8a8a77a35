"""Reads a live server: its Prometheus page and, where there are any, its KV events.

`names` knows what vLLM calls things, `page` reads one page, `ledger` turns pages into increases,
`measures` into rates, `rules` judges them. Knows no engine and imports no vLLM; whoever watches
hands pages in and takes findings out.
"""
