#!/usr/bin/env bash
# Install Chromium and its driver for the browser tests, where that asks nobody: on Debian, as root.
set -euo pipefail
command -v chromium chromedriver >/dev/null && exit
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt="timeout 300 apt-get -qq -o Acquire::http::Timeout=20 -o Acquire::Retries=1"
    export DEBIAN_FRONTEND=noninteractive
    echo "apt-get installs Chromium for the browser tests."
    { $apt update && $apt install -y --no-install-recommends chromium chromium-driver; } >/dev/null && exit
fi
echo "Chromium is missing, the browser tests are skipped: on Debian, 'apt-get install chromium chromium-driver'." >&2
