LIMIT=${1:-580}; . .gpu/lib.sh; export CUDA_VISIBLE_DEVICES=0
rm -f /tmp/warm_done_*
(taskset -c 6-15 python3 .gpu/cu.py; taskset -c 6-15 python3 .gpu/warm.py 5 $WARM) > /tmp/o/warm.log 2>&1 & W=$!
export TORCHINDUCTOR_COMPILE_THREADS=4
go attn 75 taskset -c 0-5 python3 .gpu/attn.py 50
for n in $PAGES; do page $n; done
kill $W 2>/dev/null
cat /tmp/o/warm.log | cut -c1-220; tail -n 22 /tmp/o/attn.log | cut -c1-330
pack
