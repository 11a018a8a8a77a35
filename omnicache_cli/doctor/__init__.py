"""What this machine can do with omnicache: facts that were gathered, judged; nothing is touched.

`facts` is what was gathered (by `engine.doctor`), `packages` and `machine` judge it thing by thing,
`commands` says what follows for each command, `report` tells it.
"""
