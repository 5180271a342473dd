[ -d /tmp/site/pytest ] || python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl || exit 1
export PYTHONPATH=$PWD:/tmp/site JUPYTER_PATH=/tmp/site/share/jupyter PYTHONUNBUFFERED=1 OMP_NUM_THREADS=8 MPLBACKEND=agg
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
rm -rf /tmp/o; mkdir -p /tmp/o/nb /tmp/o/res; nvidia-smi -L | cut -c1-30
go() { # name most cmd...
  name=$1; most=$2; shift 2; left=$((LIMIT - SECONDS)); [ $left -lt 15 ] && { echo "SKIP $name"; return 1; }
  [ $most -gt $left ] && most=$left; t=$SECONDS
  timeout -k 3 $most "$@" > /tmp/o/$name.log 2>&1; rc=$?; echo "$name rc=$rc $((SECONDS-t))s at $SECONDS"; return $rc; }
page() { go page$1 ${2:-110} taskset -c 0-5 make record PY=python3 NB=$1 && cp notebooks/$1_*.ipynb /tmp/o/nb/; }
pages() { for n in $*; do page $n; done; }
ben() { go bench_$1 ${2:-140} make bench PY=python3 OP=$1; }
pack() { cp -r data/results /tmp/o/res/; (cd /tmp/o && tar czf $OUT/o.tgz .)
  for f in /tmp/o/page*.log; do grep -q "Error" $f && { echo "== $f"; sed 's/\x1b\[[0-9;]*m//g' $f | grep -E "Error" | tail -n 3 | cut -c1-300; }; done; ls -la $OUT | tail -1; }
