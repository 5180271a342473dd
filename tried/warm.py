"""Run pages once with timing left out, several at a time: fills the caches of Triton, Inductor and nvcc."""
import os, shutil, subprocess, sys, time
from concurrent.futures import ThreadPoolExecutor
t0=time.time()
shutil.rmtree("/tmp/warm", ignore_errors=True)
shutil.copytree(".", "/tmp/warm", ignore=shutil.ignore_patterns(".git",".whl"))
with open("/tmp/warm/lib/measure/bench.py","a") as f: f.write('''

def in_turns(calls, rep_ms=200, seed=0):
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    return {n: Timing(100.0, 100.0, 100.0) for n in calls}


def host_us(fn, n_calls=100, n_repeats=7):
    fn()
    return 10.0
''')
env=os.environ|{"PYTHONPATH":"/tmp/warm:/tmp/site","TORCHINDUCTOR_COMPILE_THREADS":"1","OMP_NUM_THREADS":"2"}
env.pop("FUSED_KERNELS_RECORD",None)
def one(n):
    t=time.time()
    try: r=subprocess.run(["timeout","-k","3","150",sys.executable,"-m","lib.recorded.notebooks","run",n],cwd="/tmp/warm",env=env,capture_output=True,text=True); rc=r.returncode; tail=[l for l in r.stderr.splitlines() if "Error" in l][-2:] if rc else ""
    except Exception as e: rc,tail=-1,repr(e)
    print(n,"rc",rc,round(time.time()-t),"s at",round(time.time()-t0),tail,flush=True); open(f"/tmp/warm_done_{n}","w").close()
    if rc: open(f"/tmp/o/warm_{n}.log","w").write(r.stderr[-6000:])
with ThreadPoolExecutor(int(sys.argv[1])) as pool: list(pool.map(one, sys.argv[2:]))
