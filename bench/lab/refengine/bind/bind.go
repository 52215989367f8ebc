// Package bind is how the KV of a prompt reaches a decode engine that was chosen before
// the prefill: the decode engine tells where the KV may go, and the prefill engine writes
// it there. It has the two ends of that, and knows no HTTP server and no requests.
package bind

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"sync/atomic"
)

// The side channel between decode and prefill engines, on the engines' own ports.
const (
	RegisterPath = "/kv/register" // of a prefill engine: there is room for this KV
	PushPath     = "/kv/push"     // of a decode engine: this KV was written
)

// Registration is a decode engine's word that it has room for a request's KV.
type Registration struct {
	ID      string `json:"id"`                  // the request, or its room
	Engine  string `json:"engine_id,omitempty"` // of the prefill engine that it is meant for; empty: whichever reads it
	Address string `json:"address"`             // host:port of the decode engine
	Rank    int    `json:"rank"`                // of the prefill engine, as the decode engine knows it; -1: it does not
	Cut     bool   `json:"cut,omitempty"`       // no KV can be written to the decode engine
}

// Push is a prefill engine's word that one of its workers has written its part of the KV.
type Push struct {
	ID      string `json:"id"`
	To      string `json:"to,omitempty"`   // id of the decode engine whose blocks were written; empty: whichever reads it
	Sender  string `json:"sender"`         // id of the prefill engine
	Worker  int    `json:"worker"`         // of the prefill engine
	Key     uint64 `json:"key,string"`     // of the content
	Answer  uint64 `json:"answer,string"`  // to that content
	Blocks  []int  `json:"blocks"`         // that were written; nil: those that were registered
	Sampled uint64 `json:"sampled,string"` // what the first token was sampled with
	Cached  int    `json:"cached"`         // tokens that the prefill engine had already
	Failed  bool   `json:"failed,omitempty"`
	Broken  bool   `json:"broken,omitempty"` // a part of the KV is missing, and nothing shows it
	Begins  bool   `json:"begins,omitempty"` // nothing is written yet: the answer comes when the decode engine's core takes part
}

// Counts are told what happens.
type Counts struct {
	Callbacks, Pushes, LostPushes, MixedPushes, FreedWrites, RoomTimeouts *atomic.Int64
}

// Post sends a message to another engine.
func Post(ctx context.Context, client *http.Client, address, path string, message any) error {
	body, err := json.Marshal(message)
	if err != nil {
		return err
	}
	status, err := post(ctx, client, "http://"+address+path, body)
	if err == nil && status != http.StatusOK {
		return fmt.Errorf("engine %s: status %d", address, status)
	}
	return err
}

func post(ctx context.Context, client *http.Client, url string, body []byte) (status int, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		return 0, err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := client.Do(req)
	if err != nil {
		return 0, err
	}
	defer func() { _ = resp.Body.Close() }()
	_, err = io.Copy(io.Discard, io.LimitReader(resp.Body, 1<<20))
	return resp.StatusCode, err
}
