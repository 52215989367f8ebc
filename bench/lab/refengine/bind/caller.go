package bind

import (
	"context"
	"net/http"
)

// What a decode scheduler does about its callbacks.
const (
	callers = 32 // are under way at once
	tries   = 3  // of one that reaches nobody
)

// Caller makes the callbacks of one decode scheduler.
type Caller struct {
	client *http.Client
	count  Counts
	slots  chan struct{}
}

// NewCaller calls back through client, which must have no time limit.
func NewCaller(client *http.Client, count Counts) *Caller {
	return &Caller{client: client, count: count, slots: make(chan struct{}, callers)}
}

// Call posts body to url. It waits until few enough callbacks are under way, and then as long as
// the answer takes. The status of the answer is not looked at: 500 counts as delivered. Only an
// error of the connection is tried again, without a pause.
func (c *Caller) Call(ctx context.Context, url string, body []byte) {
	select {
	case c.slots <- struct{}{}:
		defer func() { <-c.slots }()
	case <-ctx.Done():
		return
	}
	for range tries {
		if _, err := post(ctx, c.client, url, body); err == nil {
			c.count.Callbacks.Add(1)
			return
		}
	}
}

// Callback is what a layerwise decode engine posts to its request's metaserver: where the KV goes.
type Callback struct {
	TokenIDs         []int   `json:"token_ids"`
	RequestID        string  `json:"request_id"`
	DoRemotePrefill  bool    `json:"do_remote_prefill"`
	DoRemoteDecode   bool    `json:"do_remote_decode"`
	RemoteBlockIDs   [][]int `json:"remote_block_ids"`
	RemoteBlockSize  []int   `json:"remote_block_size"`
	RemoteEngineID   string  `json:"remote_engine_id"`
	RemoteHost       string  `json:"remote_host"`
	RemotePort       int     `json:"remote_port"`
	RemoteTPSize     int     `json:"remote_tp_size"`
	RemotePCPSize    int     `json:"remote_pcp_size"`
	RemoteDCPSize    int     `json:"remote_dcp_size"`
	RemoteCachedToks int     `json:"remote_cached_tokens"`
	RemotePPSize     int     `json:"remote_pp_size,omitempty"` // of no version that there is
}

// NewCallback is the callback for a request. Without blocks it needs nothing.
func NewCallback(id, engine, host string, port, blockSize int, blocks []int) Callback {
	c := Callback{TokenIDs: []int{}, RequestID: id, DoRemoteDecode: true, RemoteBlockIDs: [][]int{}, RemoteBlockSize: []int{blockSize},
		RemoteEngineID: engine, RemoteHost: host, RemotePort: port, RemoteTPSize: 1, RemotePCPSize: 1, RemoteDCPSize: 1}
	if len(blocks) > 0 {
		c.RemoteBlockIDs = append(c.RemoteBlockIDs, blocks)
	}
	return c
}
