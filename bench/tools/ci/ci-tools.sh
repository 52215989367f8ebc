#!/bin/sh
# What some tests want beside Go: promtool and prometheus (Debian's prometheus),
# chromium, nginx (nginx-light), and buildah for the container image. As root, where apt is, they are
# installed; otherwise it says what is missing, and those tests say that they are skipped.
set -u
missing=
command -v promtool >/dev/null || missing="$missing prometheus"
command -v chromium >/dev/null || missing="$missing chromium"
command -v nginx >/dev/null || [ -x /usr/sbin/nginx ] || missing="$missing nginx-light"
command -v buildah >/dev/null || missing="$missing buildah"
[ -n "$missing" ] || exit 0
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
	echo "not installed:$missing; the tests that want them are skipped. On Debian as root: apt-get install$missing"
	exit 0
fi
export DEBIAN_FRONTEND=noninteractive
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then # no Prometheus is to run as a service because a test wants its tool
	printf '#!/bin/sh\nexit 101\n' >$policy && chmod +x $policy
	trap 'rm -f $policy' EXIT
fi
# shellcheck disable=SC2086 # several packages
if ! { apt-get install -qq -y --no-install-recommends $missing || { apt-get update -qq && apt-get install -qq -y --no-install-recommends $missing; }; } >/dev/null 2>&1; then
	echo "apt-get could not install:$missing; the tests that want them are skipped"
fi
