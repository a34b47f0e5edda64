for d in mls ml100k; do
for wd in 0 .1 .3; do for b in 256; do for e in 3 5; do
bash job.sh 1 ${d}_wd${wd}_b${b}_e$e $d --weight-decay $wd --smallest-batch $b --epochs $e
done; done; done; done
