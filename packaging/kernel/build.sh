#!/bin/sh
# Builds the tuned guest kernel and puts it where vk looks for it:
#
#   <state_dir>/kernels/tuned-VERSION-DIGEST/
#     vmlinux      stripped, booted by its PVH entry
#     bzImage      the same kernel, for loaders without PVH
#     modules/     what is no use in every guest (KVM, for nesting)
#     config       what it was built from
#     kernel.json  manifest (vmm/boot.Manifest)
#
# DIGEST is of the config, so a kernel of the same source and config is never
# built twice. Equal source, config and compiler give equal files.
#
#   build.sh [--state-dir DIR] [--from-tree DIR] [--print-dir] [--no-install]
#
#   --from-tree DIR  take vmlinux, bzImage and modules from a tree that is built
#                    already with this config
#   --print-dir      say where the kernel goes, and do nothing
#   --no-install     do not install missing packages, fail instead
set -eu
here=$(cd "$(dirname "$0")" && pwd)
series=6.12
state=${VIRTKIT_STATE_DIR:-}
tree=
print=
install=yes

say() { echo "kernel: $*" >&2; }
die() { say "$*"; exit 1; }

while [ $# -gt 0 ]; do
	case $1 in
	--state-dir) [ $# -gt 1 ] || die "--state-dir needs a directory"; state=$2; shift 2 ;;
	--from-tree) [ $# -gt 1 ] || die "--from-tree needs a directory"; tree=$(cd "$2" && pwd); shift 2 ;;
	--print-dir) print=yes; shift ;;
	--no-install) install=; shift ;;
	*) echo "usage: build.sh [--state-dir DIR] [--from-tree DIR] [--print-dir] [--no-install]" >&2; exit 2 ;;
	esac
done
if [ -z "$state" ]; then
	state=/var/lib/virtkit
	if ! { mkdir -p "$state" && [ -w "$state" ]; } 2>/dev/null; then
		state=${XDG_STATE_HOME:-$HOME/.local/state}/virtkit
	fi
fi
kernels=$state/kernels
digest=$(sha256sum "$here/config" | cut -c1-8)

# The version that apt would give, or that is installed, without its Debian part.
source_version() {
	v=$(dpkg-query -W -f '${Version}' linux-source-$series 2>/dev/null || true)
	[ -n "$v" ] || v=$(apt-cache policy linux-source-$series 2>/dev/null | sed -n 's/^ *Candidate: *//p')
	case $v in
	'' | '(none)') return 1 ;;
	esac
	echo "${v%%-*}"
}

if [ -n "$tree" ]; then
	[ -f "$tree/vmlinux" ] && [ -f "$tree/arch/x86/boot/bzImage" ] || die "$tree has no vmlinux and bzImage in it"
	version=$(cat "$tree/include/config/kernel.release")
	version=${version%%-*}
else
	version=$(source_version) || die "apt knows no linux-source-$series: run apt-get update as root"
fi
out=$kernels/tuned-$version-$digest
if [ -n "$print" ]; then
	echo "$out"
	exit 0
fi
if [ -f "$out/kernel.json" ]; then
	say "$out is there already"
	exit 0
fi
mkdir -p "$kernels"
chmod 755 "$kernels"
exec 9>"$kernels/.build.lock"
if ! flock -n 9; then
	say "waiting for another build"
	flock 9
	if [ -f "$out/kernel.json" ]; then
		say "$out is there already"
		exit 0
	fi
fi
rm -rf "$kernels"/.build-?????? # of a build that was killed: the lock is ours
work=$(mktemp -d "$kernels/.build-XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM HUP

as_root() {
	if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

missing() {
	for p in linux-source-$series build-essential bc bison flex libelf-dev libssl-dev xz-utils; do
		dpkg-query -W -f '${Status}' "$p" 2>/dev/null | grep -q '^install ok installed$' || printf ' %s' "$p"
	done
}

if [ -z "$tree" ]; then
	need=$(missing)
	if [ -n "$need" ]; then
		[ -n "$install" ] || die "missing packages: apt-get install$need"
		say "installing$need"
		# shellcheck disable=SC2086 # a list of packages
		as_root env DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends $need >"$work/apt.log" 2>&1 ||
			{ tail -5 "$work/apt.log" >&2; die "installing$need did not work; as root: apt-get install$need"; }
	fi
	say "unpacking linux-source-$series $version (half a minute)"
	tar -C "$work" -xf /usr/src/linux-source-$series.tar.xz
	tree=$work/linux-source-$series
	cp "$here/config" "$tree/.config"
	# Nothing of the time, the user, the machine or a git tree goes into it.
	export KBUILD_BUILD_TIMESTAMP='Thu Jan  1 00:00:00 UTC 1970' KBUILD_BUILD_USER=virtkit KBUILD_BUILD_HOST=virtkit
	export KBUILD_BUILD_VERSION=1 LOCALVERSION= LC_ALL=C TZ=UTC
	make -s -C "$tree" olddefconfig >"$work/config.log" 2>&1 || { tail -5 "$work/config.log" >&2; die "the config does not fit this source"; }
	say "building $version with $(nproc) jobs (12 minutes on two cores); log in $kernels/build.log"
	if ! nice make -C "$tree" -j"$(nproc)" vmlinux bzImage modules >"$kernels/build.log" 2>&1; then
		grep -n -m5 -i 'error' "$kernels/build.log" >&2 || tail -20 "$kernels/build.log" >&2
		die "building did not work; see $kernels/build.log"
	fi
fi

mkdir -p "$work/out/modules"
strip -s -o "$work/out/vmlinux" "$tree/vmlinux"
cp "$tree/arch/x86/boot/bzImage" "$work/out/bzImage"
cp "$tree/.config" "$work/out/config"
for m in arch/x86/kvm/kvm.ko arch/x86/kvm/kvm-intel.ko arch/x86/kvm/kvm-amd.ko virt/lib/irqbypass.ko \
	drivers/vhost/vhost.ko drivers/vhost/vhost_iotlb.ko drivers/vhost/vhost_net.ko drivers/vhost/vhost_vsock.ko; do
	if [ -f "$tree/$m" ]; then
		strip --strip-debug -o "$work/out/modules/$(basename "$m")" "$tree/$m"
	fi
done
cp "$tree/modules.builtin" "$work/out/modules/modules.builtin"
chmod -R u=rwX,go=rX "$work/out"
release=$(cat "$tree/include/config/kernel.release")
{
	printf '{\n\t"version": "%s",\n\t"source": "linux-source-%s %s",\n' "$release" "$series" "$version"
	printf '\t"image": "vmlinux",\n\t"bzimage": "bzImage",\n\t"modules": "modules",\n\t"tuned": true,\n\t"sha256": {'
	sep=
	for f in $(cd "$work/out" && find . -type f ! -name kernel.json | sed 's,^\./,,' | LC_ALL=C sort); do
		printf '%s\n\t\t"%s": "%s"' "$sep" "$f" "$(sha256sum "$work/out/$f" | cut -d' ' -f1)"
		sep=,
	done
	printf '\n\t}\n}\n'
} >"$work/out/kernel.json"
chmod 644 "$work/out/kernel.json"
sync -f "$work/out"
rm -rf "$out"
mv -T "$work/out" "$out"
sync -f "$kernels"
say "made $out ($release)"
