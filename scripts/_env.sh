# Sourced by the scripts beside it: makes the checkout's own environment in .venv, once, and
# installs again only when pyproject.toml, the constraints or the interpreter changed.
# Sets ROOT (the checkout) and puts the environment's commands first on PATH.
# With torch_version set it is an environment of its own, .venv-torch-VERSION, with that torch.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"

torch_version="${torch_version:-}"
VENV="$ROOT/.venv${torch_version:+-torch-$torch_version}"

_find_python() {
    local candidate
    # A name may be there and still not run (a version manager's stand-in), so each one is tried.
    for candidate in python3 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            # Inside an activated environment this is the interpreter that the environment was made from.
            "$candidate" -c 'import os, sys
print(os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable))'
            return 0
        fi
    done
    echo "error: no Python 3.11 or newer found as python3, python3.13, python3.12 or python3.11;" \
        "install one and put it on PATH" >&2
    return 1
}

_stamp() {
    # The checkout's path counts: the editable install points at it.
    {
        printf '%s\n%s\n%s\n' "$ROOT" "$1" "$torch_version"
        cat "$ROOT/pyproject.toml" "$ROOT/scripts/constraints.txt"
    } | cksum
}

_constraints() {
    # Another torch has its own bounds on what it builds upon, so those pins go with torch's.
    if [[ -z "$torch_version" ]]; then
        cat "$ROOT/scripts/constraints.txt"
    else
        grep -Ev '^(torch|setuptools|sympy|networkx)==' "$ROOT/scripts/constraints.txt"
        printf 'torch==%s\n' "$torch_version"
    fi
}

_requirements() {
    # What pyproject.toml asks for, one a line, without its bound on torch: the constraints have that.
    "$1" - "$ROOT/pyproject.toml" <<'EOF'
import re, sys, tomllib

with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
extras = project["optional-dependencies"]
for line in [*project["dependencies"], *extras["dev"], *extras["hf"]]:
    print("torch" if re.match(r"torch\b", line) else line)
EOF
}

_install() {
    local python="$1" pip=("$VENV/bin/python" -m pip install -qq)
    echo "Installing piper-owner and its tools into $VENV (once, a few minutes) ..."
    rm -rf "$VENV"
    if ! "$python" -m venv "$VENV"; then
        echo "error: $python cannot make a virtual environment; on Debian and Ubuntu its venv module" \
            "is a package of its own (python3-venv)" >&2
        return 1
    fi
    _constraints >"$VENV/constraints.txt"
    _requirements "$python" >"$VENV/requirements.txt"
    pip+=(--constraint "$VENV/constraints.txt")
    # hatchling comes first and the build is not isolated, so that the constraints hold for it too.
    "${pip[@]}" hatchling && "${pip[@]}" --requirement "$VENV/requirements.txt" &&
        "${pip[@]}" --no-build-isolation --no-deps --editable "$ROOT"
}

_ensure_environment() {
    local python stamp file="$VENV/.installed-for"
    python="$(_find_python)" || return 1
    stamp="$(_stamp "$python")"
    if [[ -f "$file" && "$(cat "$file")" == "$stamp" ]] && "$VENV/bin/python" -c '' 2>/dev/null; then
        return 0
    fi
    _install "$python" || return 1
    printf '%s\n' "$stamp" >"$file"
}

export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
# Two scripts at once: the second waits until the first has installed (where flock exists).
if command -v flock >/dev/null 2>&1; then
    exec 9>"$VENV.lock"
    flock 9
    _ensure_environment
    exec 9>&-
else
    _ensure_environment
fi
export VIRTUAL_ENV="$VENV" PATH="$VENV/bin:$PATH"
