#!/usr/bin/env bash
# Chromium and its driver, for tests/hosts/test_report_in_browser.py: installs Debian's packages where they are
# missing and it may; prints what to do otherwise. Nothing is done twice. Without them that test is skipped, so the
# script ends with 0 either way.
set -uo pipefail

there() {
    command -v chromium >/dev/null && command -v chromedriver >/dev/null
}

there && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing chromium, chromium-driver and a font"
    apt-get update -qq &&
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
            chromium chromium-driver fonts-dejavu-core >/dev/null
    there && exit 0
    echo "apt-get could not install them" >&2
fi
echo "chromium and chromedriver aren't installed, so the report's test in a browser is skipped." >&2
echo "to mend: apt-get install chromium chromium-driver fonts-dejavu-core  (as root, on Debian; elsewhere put" >&2
echo "programs of these names on the path)" >&2
exit 0
