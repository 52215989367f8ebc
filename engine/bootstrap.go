package engine

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/url"
	"strconv"

	"evenkeel/mooncake"
)

// Bootstrap asks the bootstrap server of a prefill engine (vLLM with the Mooncake connector) for
// the engine id of the target's rank, which the decode engine needs. The server listens on this
// port of the engine's host. TransferID is left for the caller to set.
func Bootstrap(ctx context.Context, c *Client, t *Target, port int) (mooncake.BootstrapInfo, error) {
	host := net.JoinHostPort(t.URL.Hostname(), strconv.Itoa(port))
	server := &Target{ID: host, URL: &url.URL{Scheme: "http", Host: host}, Rank: -1}
	body, err := c.read(ctx, server, "/query", answerLimit)
	if err != nil {
		return mooncake.BootstrapInfo{}, fmt.Errorf("bootstrap server of prefill %s: %w; check the profile's bootstrap_port", t.ID, err)
	}
	var ranks map[string]struct {
		EngineID string `json:"engine_id"`
	}
	if err := json.Unmarshal(body, &ranks); err != nil {
		return mooncake.BootstrapInfo{}, fmt.Errorf("bootstrap server %s: GET /query: %w", host, err)
	}
	r := ranks[strconv.Itoa(max(0, t.Rank))] // a target without a rank, whose Rank is -1, means rank 0
	if r.EngineID == "" {
		return mooncake.BootstrapInfo{}, fmt.Errorf("bootstrap server %s: GET /query names no engine_id of rank %d", host, max(0, t.Rank))
	}
	return mooncake.BootstrapInfo{BootstrapAddr: "http://" + host, EngineID: r.EngineID}, nil
}
