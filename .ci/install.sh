#!/usr/bin/env bash
# Install packages into .venv (or VENV) by uv, at pip's configured places; by pip where uv cannot be had.
# The versions are those of constraints.txt (or CONSTRAINTS).
# TORCH_BACKEND (cpu, cu126, auto, ...) selects the build of torch, see `uv pip install --help`.
set -euo pipefail
cd "$(dirname "$0")/.."
bin="${VENV:-.venv}/bin"
python="$bin/python"
constraints="${CONSTRAINTS:-constraints.txt}"

pip_setting() { # as a comma-separated list; empty if unset
    local name="PIP_$(tr 'a-z-' 'A-Z_' <<<"$1")"
    local value="${!name:-$("$python" -m pip config get "global.$1" 2>/dev/null || true)}"
    xargs <<<"$value" | tr ' ' ','
}

if [ ! -x "$bin/uv" ]; then
    "$python" -m pip install --quiet --disable-pip-version-check --constraint "$constraints" uv ||
        echo "uv cannot be installed; pip takes its place, which takes minutes longer." >&2
fi
if [ -x "$bin/uv" ]; then
    export UV_FIND_LINKS="${UV_FIND_LINKS:-$(pip_setting find-links)}"
    index="${UV_DEFAULT_INDEX:-$(pip_setting index-url)}"
    [ -z "$index" ] || export UV_DEFAULT_INDEX="$index"
    "$bin/uv" pip install --quiet --compile-bytecode --python "$python" --constraint "$constraints" \
        ${TORCH_BACKEND:+--torch-backend="$TORCH_BACKEND"} "$@" && exit
    echo "uv could not install the packages; pip tries." >&2
fi
"$python" -m pip install --quiet --disable-pip-version-check --constraint "$constraints" "$@"
