# usage: job.sh CORE NAME DATA OPTIONS...   one training run and its four evaluations, on one core
core=$1; name=$2; data=$3; shift 3
P="taskset -c $core python -m ncf"
export PYTHONPATH=src OMP_NUM_THREADS=1
[ -s out/$name.log ] && grep -q "^$name " out/summary.txt && exit
mkdir -p out; rm -rf runs/$name
$P train --data data/$data --checkpoint-dir runs/$name --overwrite --verbose "$@" > out/$name.log 2>&1
for s in validation test; do for n in 99 all; do $P evaluate --checkpoint-dir runs/$name --split $s --valid-negative $n --json >> out/$name.log 2>/dev/null; done; done
rm -rf runs/$name
python3 - $name <<'Q'
import sys,json
n=sys.argv[1]; L=open(f'out/{n}.log').read().splitlines()
js=[json.loads(l) for l in L if l.startswith('{')]
best=[l for l in L if l.startswith('Best Epoch')]; ep=[l for l in L if l.startswith('Average Train Time')]
f=lambda j:f"{j['hr@10']:.4f}/{j['ndcg@10']:.4f}"
open('out/summary.txt','a').write(f"{n:28} val {f(js[0])} full {f(js[1])} | test {f(js[2])} full {f(js[3])} | best {best[0].split()[-1]} ep {float(ep[0].split()[-1]):.1f}s\n" if len(js)==4 else f"{n} FAILED {L[-1] if L else ''}\n")
Q
