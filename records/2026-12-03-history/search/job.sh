name=$1; data=$2; shift 2
export PYTHONPATH=src
P="python -m ncf"
rm -rf search/r_$name
$P train --data data/$data --checkpoint-dir search/r_$name --layers none --item-bias --loss softmax -n 0 --schedule linear -b1 .9 -b2 .999 --overwrite --verbose "$@" > search/$name.log 2>&1
for s in validation test; do for n in 99 all; do $P evaluate --checkpoint-dir search/r_$name --split $s --valid-negative $n --json >> search/$name.log 2>/dev/null; done; done
rm -rf search/r_$name
python3 - $name <<'P'
import sys,json,re
n=sys.argv[1]; L=open(f'search/{n}.log').read().splitlines()
js=[json.loads(l) for l in L if l.startswith('{')]
best=[l for l in L if l.startswith('Best Epoch')]; tt=[l for l in L if l.startswith('Time to Train')]; ep=[l for l in L if l.startswith('Average Train Time')]
f=lambda j:f"{j['hr@10']:.4f}/{j['ndcg@10']:.4f}"
open('search/summary.txt','a').write(f"{n:28} val {f(js[0])} full {f(js[1])} | test {f(js[2])} full {f(js[3])} | best {best[0].split()[-1]} ep {float(ep[0].split()[-1]):.1f}s\n" if len(js)==4 else f"{n} FAILED {L[-1] if L else ''}\n")
P
