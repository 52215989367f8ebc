// Command ha runs several real proxies, processes of their own, in front of the same
// engines, under clients that check every token: it kills the owner of a decode
// group, starts it again, ends another by a signal, lets one stand still until its
// groups are another's, cuts one off, and takes the store of leases away from all.
// It measures how long a group has no owner and holds what docs/fleet.md promises, by
// the proxies' books and by what the engines saw. A breach is told in full and is exit code 1.
//
// The lease's store is an etcd in this process, and so are the engines.
package main

import (
	"evenkeel/bench/rigs/chaos/scenes"
	"evenkeel/bench/rigs/testbed"
)

func main() { testbed.Main("ha", testbed.Judged(scenes.HA)) }
