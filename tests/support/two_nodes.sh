# Two nodes on this machine, each a network, mount, host name and shared-memory namespace of its own; their names mean
# 127.0.1.1 in their /etc/hosts, as on Debian. `two_nodes.sh FOLDER PORT COMMAND...` runs COMMAND as a rank on each.
set -e
folder=$1 port=$2
shift 2
for k in 1 2; do
  { echo "127.0.0.1 localhost"; echo "127.0.1.1 remat$k"; echo "10.78.0.$((3 - k)) remat$((3 - k))"; } > "$folder/hosts$k"
  unshare --net --uts --mount --ipc --fork --kill-child bash -c "hostname remat$k
    mount --bind $folder/hosts$k /etc/hosts; ip link set lo up; touch $folder/ready$k; sleep 300" &
  node[$k]=$!
done
trap 'kill -KILL "${node[@]}" 2>/dev/null || true' EXIT
while [ ! -e "$folder/ready1" ] || [ ! -e "$folder/ready2" ]; do
  kill -0 "${node[1]}" "${node[2]}"
  sleep 0.1
done
for k in 1 2; do inside[$k]=$(pgrep -P "${node[$k]}" | head -1); done
ip link add "rm$port" netns "${inside[1]}" type veth peer name "rm$port" netns "${inside[2]}"
for k in 1 2; do
  in="nsenter -t ${inside[$k]} -n"
  $in ip link set "rm$port" name eth0
  $in ip addr add "10.78.0.$k/24" dev eth0
  $in ip link set eth0 up
done
for k in 1 2; do
  nsenter -t "${inside[$k]}" -n -u -m -i env RANK=$((k - 1)) WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 \
    MASTER_ADDR=remat1 MASTER_PORT="$port" "$@" > "$folder/out$k" 2>&1 &
  rank[$k]=$!
done
wait "${rank[1]}"
wait "${rank[2]}"
