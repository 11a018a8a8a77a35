#!/bin/sh
# Makes a virtual environment from the pinned list, with the project in it as an editable install.
# Usage: requirements/install.sh PYTHON VENV [LIST]       (normally through `make setup`)
#
# Settings of pip and uv that say where packages come from (index, mirror, proxy, certificates,
# cache) are kept. Those that say where they go, or that change which ones are taken, are not:
# the list is complete and pinned.
set -eu

python=$1
venv=$2
list=${3:-requirements/cpu.txt}

die() {
    echo "make setup: $1" >&2
    exit 1
}

unset PYTHONHOME PYTHONPATH VIRTUAL_ENV CONDA_PREFIX || true
for name in TARGET PREFIX ROOT CONSTRAINT BUILD_CONSTRAINT REQUIREMENT REQUIRE_HASHES NO_BINARY \
    ONLY_BINARY DRY_RUN PYTHON EDITABLE PRE REPORT IGNORE_INSTALLED NO_BUILD_ISOLATION; do
    unset "PIP_$name" || true
done
for name in TARGET PREFIX CONSTRAINT BUILD_CONSTRAINT OVERRIDE REQUIRE_HASHES NO_BINARY \
    NO_BINARY_PACKAGE NO_BUILD NO_BUILD_PACKAGE NO_BUILD_ISOLATION EXCLUDE_NEWER RESOLUTION \
    PRERELEASE TORCH_BACKEND SYSTEM_PYTHON PYTHON MANAGED_PYTHON NO_MANAGED_PYTHON \
    BREAK_SYSTEM_PACKAGES PROJECT WORKING_DIR WORKING_DIRECTORY; do
    unset "UV_$name" || true
done
export PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1

command -v "$python" >/dev/null 2>&1 ||
    die "$python not found; install Python 3.11, or name one: make setup PYTHON=/path/to/python3.11"
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null ||
    die "$python does not run or is not Python 3.11, for which $list is pinned; name one: make setup PYTHON=/path/to/python3.11"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    die "$python has no venv module; install it (on Debian and Ubuntu the package python3.11-venv)"

echo "make setup: environment in $venv, from $list"
"$python" -m venv "$venv" || die "$python -m venv $venv failed, see above"

# uv is the faster of the two. Where it cannot be had, or does not know of the mirror that pip is set
# up for, pip does it: the list is complete, nothing needs to be resolved.
uv_pin=$(grep '^uv==' "$list")
if "$venv/bin/python" -m pip install --quiet --no-deps "$uv_pin"; then
    cache=$("$venv/bin/uv" cache dir 2>/dev/null) || cache=
    [ -z "$cache" ] || mkdir -p "$cache" 2>/dev/null || true
    if [ -z "${UV_LINK_MODE:-}" ] && [ "$(stat -c %d "$cache" 2>/dev/null)" != "$(stat -c %d "$venv")" ]; then
        export UV_LINK_MODE=copy # hard links do not cross file systems; uv would warn
    fi
    if "$venv/bin/uv" pip sync --quiet --python "$venv/bin/python" "$list" &&
        "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --no-deps --no-build-isolation --editable .; then
        exit 0
    fi
    echo "make setup: uv failed, trying pip, which is slower" >&2
fi
"$venv/bin/python" -m pip install --quiet --no-deps --requirement "$list" ||
    die "cannot install $list; check network and index settings (PIP_INDEX_URL, UV_DEFAULT_INDEX)"
"$venv/bin/python" -m pip install --quiet --no-deps --no-build-isolation --editable . ||
    die "cannot install the project itself, see above"
