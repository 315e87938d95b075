#!/usr/bin/env bash
# Makes the environment in which the parity tests run other programs' own code, next to the project's and apart from it
# (z-lab's package installs a console script named `dflash`):
#
#   tests/parity/make_environment.sh [FOLDER] [PYTHON]      default: .parity, made from .venv/bin/python
#
# torch and whatever else fits is taken from PYTHON's environment: a .pth file names its site-packages after the new
# environment's own, so that what is installed here wins. speculators 0.9.0 wants transformers <= 5.19, and the other
# two run with that version too. What the three need beyond this for downloading and preparing data is left out.
set -euo pipefail
folder=${1:-.parity}
python=${2:-.venv/bin/python}
packages=(
  transformers==5.19.0
  dflash==0.1.0
  specforge==0.2.0
  speculators==0.9.0
  hs-connectors==0.9.0
  loguru==0.7.3
)
"$python" -c 'import sys; sys.exit("speculators and specforge need Python >= 3.11") if sys.version_info < (3, 11) else None'
stamp=$folder/installed
wanted="$("$python" -c 'import sys; print(sys.prefix, sys.version_info[:2])') ${packages[*]}"
if [[ -f $stamp && "$(cat "$stamp")" == "$wanted" ]]; then
  echo "$folder is up to date"
  exit 0
fi
rm -rf "$folder"
"$python" -m venv --without-pip "$folder"
shared=$("$python" -c 'import sysconfig; print("\n".join(dict.fromkeys(sysconfig.get_path(k) for k in ("purelib", "platlib"))))')
own=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "$shared" > "$own/zz_shared_environment.pth"
# shellcheck disable=SC2086  # PIP_FLAGS holds several words
"$python" -m pip --python "$folder/bin/python" install --quiet --disable-pip-version-check --no-deps --no-compile \
  ${PIP_FLAGS:-} "${packages[@]}"
echo "$wanted" > "$stamp"
