package bind

import (
	"errors"
	"fmt"
	"sync/atomic"
)

// FakeHost is the bootstrap host with which SGLang runs a request that no other engine takes part
// in: the prefill engine writes no KV, and the decode engine waits for none.
const FakeHost = "2.2.2.2"

// Controller is the process of SGLang that shares requests out to DP ranks behind one port.
type Controller struct {
	Ranks   int
	Follows bool // a request without a rank goes to the rank of its room; else the ranks take turns
	turn    atomic.Uint64
}

// Dispatch says which rank a request goes to. named is its rank and room its room, -1: it has none.
// masked says which ranks have lost their GPUs. The controller catches no exception: an error ends
// the whole server.
func (c *Controller) Dispatch(named int, room int64, masked func(rank int) bool) (rank int, err error) {
	switch {
	case named >= 0 && masked(named):
		return 0, fmt.Errorf("DP rank %d is not active", named)
	case named >= 0:
		return named, nil
	case c.Follows && room < 0:
		return 0, errors.New("req.bootstrap_room should not be None: do not send requests directly to prefill or decode instances")
	case c.Follows:
		return int(room % int64(c.Ranks)), nil
	}
	// The real controller takes one request after the other. Here several may ask at once, and none
	// may see another's turn.
	for turn, i := c.turn.Add(1), 0; i < c.Ranks; i++ {
		if rank = int((turn + uint64(i)) % uint64(c.Ranks)); !masked(rank) {
			return rank, nil
		}
	}
	return 0, errors.New("no active DP workers are available for routing")
}
