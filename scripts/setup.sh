# Sourced by the scripts beside it. Makes .venv in the repository and installs kvops there, built from this tree.
#
#   KVOPS_TORCH   the PyTorch to install and build with, as pip spells it    default: torch>=2.11
#   KVOPS_CUDA    AUTO (kernels where nvcc is found), ON or OFF              default: AUTO
#   PYTHON        the Python that makes .venv                                default: python3
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$root/.venv/bin/python

# setup [EXTRAS]   as in: setup '[test]'
setup() {
    [[ -x $python ]] || "${PYTHON:-python3}" -m venv "$root/.venv"
    # PyTorch warns at every import where it finds no numpy.
    "$python" -m pip install "${KVOPS_TORCH:-torch>=2.11}" numpy scikit-build-core cmake ninja
    echo "Building kvops. CUDA kernels take a few minutes the first time."
    "$python" -m pip install --no-build-isolation "$root${1:-}"
    # -I: from what was installed, not from the source folder that may be the current one.
    "$python" -I - <<'EOF'
from kvops import build_info, cuda_available

kernels = f" with CUDA kernels for {build_info.ARCHITECTURES}" if build_info.CUDA else ""
memory = "Moves GPU memory and host memory" if cuda_available() else f"Host memory only: {cuda_available().reason}"
print(f"kvops {build_info.VERSION}{kernels}. {memory}.")
EOF
}
