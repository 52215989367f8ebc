// Command regions runs three real proxies, processes of their own with engines
// of their own, that forward to each other over links with delay, and in
// network namespaces with loss: it holds that forwarded answers are those of
// the region itself, byte for byte, measures what forwarding adds to the first
// token, kills a region and cuts a link under load, and brings both back. A
// breach is told in full and is exit code 1.
//
// Namespaces need Linux, root, iproute2 and TUN devices, between which this process
// passes the packets on. Without all that the links are TCP relays on loopback.
package main

import (
	"evenkeel/bench/rigs/chaos/scenes"
	"evenkeel/bench/rigs/testbed"
)

func main() { testbed.Main("regions", testbed.Judged(scenes.Regions)) }
