// Package tapnet puts a guest on a tap device of the host: net modes "tap" and
// "pool". The host's kernel routes and masquerades its traffic; no frame passes
// through vk, and nothing but this package's rules holds the guest back.
//
// Vocabulary:
//
//	device   a tap device with one guest behind it, and a network of its own
//	slot     the device's number N, in its name: vktapN (mode tap) or
//	         vktap-pN (vk's own pool)
//	block    the /30 of a slot: the host is .1 of it, the guest .2
//	lease    a pool's device with a job attached to it
//	lock     the device vktap-lock; see below
//	rules    the nftables table "inet virtkit", one for all devices
//
// Invariants:
//
//   - A device of mode tap is not persistent: the kernel removes it, with its
//     addresses and routes, when the last descriptor of it is closed. The
//     supervisor and its VMM have the only ones, so a kill -9 at any instruction
//     leaves no device behind.
//   - A lease is the attachment itself, which the kernel gives to one process at
//     a time and takes back when that dies. There is no file about it.
//   - Whoever makes a device, changes the rules or sweeps holds the lock. It is a
//     device too, made exclusively and not persistent: one for each network
//     namespace, taken only with the right to do all this, gone with its holder.
//   - The rules name no job: they match devices by the prefix of their names and
//     tell a guest's own address from a forged one by asking the host's routes.
//     They are there before a device is up, and go with the last device, or with
//     the next sweep where the last one's supervisor was killed.
//   - Each device's alias (`ip link` shows it) names its job and the job
//     directories that it is of, so that a sweep knows whose it is.
//   - Devices that the configuration names (an administrator's pool) are attached
//     to and never changed. No rules of ours apply to them.
//
// The host has to route already: turning net.ipv4.ip_forward on would make a
// router of it between networks that have nothing to do with guests.
package tapnet
