package gateway

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"sync"
	"time"

	"evenkeel/engine"
	"evenkeel/mooncake"
	"evenkeel/prefill"
)

// engineIDs remembers what the bootstrap servers of vllm-mooncake prefillers
// call their ranks: the proxy has to name the engine to decode (contract 1.2).
type engineIDs struct {
	mu  sync.Mutex
	ids map[string]learnedID // by candidate
}

type learnedID struct {
	id string
	at time.Time
}

// engineIDLife bounds how long a restarted engine is called by its old name.
const engineIDLife = 5 * time.Second

// exchange is what the proxy brings to a probe itself: nothing for connectors
// whose prefiller answers with the hand-off.
func (g *Gateway) exchange(c prefill.Candidate, id string, attempt int) (*mooncake.Exchange, error) {
	if c.Profile.Connector != mooncake.VLLMMooncake {
		return nil, nil
	}
	addr := "http://" + net.JoinHostPort(c.Target.URL.Hostname(), strconv.Itoa(c.Profile.BootstrapPort))
	g.engineIDs.mu.Lock()
	known, ok := g.engineIDs.ids[c.ID]
	g.engineIDs.mu.Unlock()
	if !ok || time.Since(known.at) > engineIDLife {
		name, err := g.askBootstrap(addr, max(0, c.Target.Rank))
		if err != nil {
			return nil, fmt.Errorf("bootstrap server of prefill %s: %w; check bootstrap_port", c.ID, err)
		}
		known = learnedID{name, time.Now()}
		g.engineIDs.mu.Lock()
		if g.engineIDs.ids == nil {
			g.engineIDs.ids = map[string]learnedID{}
		}
		g.engineIDs.ids[c.ID] = known
		g.engineIDs.mu.Unlock()
	}
	return &mooncake.Exchange{TransferID: fmt.Sprintf("ek-%s-t%d", id, attempt), BootstrapAddr: addr, EngineID: known.id}, nil
}

func (g *Gateway) askBootstrap(addr string, rank int) (string, error) {
	u, err := url.Parse(addr)
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(g.ctx, g.cfg.Limits.ConnectTimeout)
	defer cancel()
	status, body, err := g.client.Get(ctx, &engine.Target{ID: u.Host, URL: u, Rank: -1}, "/query", 1<<20)
	if err != nil {
		return "", err
	}
	if status != http.StatusOK {
		return "", fmt.Errorf("GET /query answered %d", status)
	}
	var ranks map[string]struct {
		EngineID string `json:"engine_id"`
	}
	if err := json.Unmarshal(body, &ranks); err != nil {
		return "", fmt.Errorf("GET /query: %w", err)
	}
	r, ok := ranks[strconv.Itoa(rank)]
	if !ok || r.EngineID == "" {
		return "", fmt.Errorf("GET /query knows no engine_id of rank %d", rank)
	}
	return r.EngineID, nil
}
