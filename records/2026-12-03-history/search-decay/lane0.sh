for d in music lastfm tweet; do
for wd in 0 .5 1 2; do for b in 64 256; do for e in 5 10; do
bash job.sh 0 ${d}_wd${wd}_b${b}_e$e $d --weight-decay $wd --smallest-batch $b --epochs $e
done; done; done; done
