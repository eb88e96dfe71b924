#!/usr/bin/env bash
# `make test-all` starts real SLURM daemons and ssh between nodes of this machine. Installs them where that is possible
# without asking; says so where it is not.
set -u
lacking=
for tool in slurmctld:slurm-wlm munged:munge pdsh:pdsh sshd:openssh-server unshare:util-linux ip:iproute2; do
  PATH="$PATH:/usr/sbin:/sbin" command -v "${tool%%:*}" >/dev/null || lacking="$lacking ${tool##*:}"
done
if [ -z "$lacking" ]; then
  exit 0
fi
if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
  echo "== $lacking"
  export DEBIAN_FRONTEND=noninteractive
  # shellcheck disable=SC2086
  (apt-get update -qq && apt-get install -y -qq --no-install-recommends $lacking) >/dev/null 2>&1 && exit 0
fi
echo "tests of many nodes are skipped where they need what is missing here (Debian: apt-get install$lacking)"
exit 0
