#!/bin/bash
# Set CANN's variables, then become the program: signals reach it.
set -e
for file in /usr/local/Ascend/ascend-toolkit/set_env.sh /usr/local/Ascend/nnal/atb/set_env.sh; do
  # shellcheck disable=SC1090
  if [ -f "$file" ]; then source "$file"; fi
done
exec "$@"
