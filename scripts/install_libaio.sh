#!/usr/bin/env bash
# NVMe offload needs libaio's headers. Installs them where that is possible without asking; says so where it is not.
set -u
if echo '#include <libaio.h>' | cc -E -x c - >/dev/null 2>&1; then
  exit 0
fi
if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
  echo "== libaio"
  (apt-get update -qq && apt-get install -y -qq libaio-dev) >/dev/null 2>&1 && exit 0
fi
echo "libaio's headers are missing: NVMe offload cannot be built and its test is skipped (Debian: apt-get install libaio-dev)"
exit 0
