#!/usr/bin/env bash
# Five prompts, four with the same first 128 characters, sent twice to a tiny model on this machine.
# Usage: examples/shared_prefix.sh          (needs `omnicache` on the PATH, and vLLM beside it)
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"

run() { # shows a command, then runs it
    printf '\n$ %s\n' "$*"
    "$@"
}

run omnicache tiny-model text tiny --quiet

# The tiny model's tokenizer has one token per character, so 128 characters are 4 blocks of 32.
run omnicache trace tiny --prompts "$here/prompts.jsonl" --rounds 2 --max-tokens 8 \
    --block-size 32 --max-model-len 1024 --enforce-eager --output run --quiet

run omnicache show run --rounds --quiet
run omnicache show run --check --quiet
