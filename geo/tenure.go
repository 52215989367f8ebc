package geo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"

	"evenkeel/engine"
	"evenkeel/lease"
)

// HandBackPath is the path at which a proxy asks the holder of a region, or of a decode group, to
// hand it over.
const HandBackPath = "/evenkeel/peer/v1/handback"

// HandBack asks the holder of a region, or of one of its decode groups, to hand it over. Epoch is
// the epoch of the holder's lease.
type HandBack struct {
	Region string `json:"region"`
	Group  string `json:"group,omitempty"`
	Epoch  int64  `json:"epoch"`
}

// Scope names the region or group, for messages.
func (h HandBack) Scope() string {
	if h.Group != "" {
		return "group " + h.Group
	}
	return "region " + h.Region
}

// VotePath is the path at which an owner that cannot reach the store of leases asks another proxy
// for a promise: not to admit requests itself for a while.
const VotePath = "/evenkeel/peer/v1/pledge"

// Vote asks another proxy for a promise not to admit requests to one decode group for a while.
type Vote struct {
	Region string `json:"region"`
	Group  string `json:"group"`
	lease.Vote
}

// HandedBack is the answer of the former holder, after it has stopped admission. It lists the
// requests that the former holder still runs.
type HandedBack struct {
	HandBack
	Ranks []Resident `json:"ranks"`
}

// Resident is the load that the former holder still has on a decode rank.
type Resident struct {
	ID       string `json:"id"` // host:port or host:port/rank
	Requests int    `json:"requests"`
	KVTokens int64  `json:"kv_tokens"`
}

// maxPostAnswer bounds an answer to post, in bytes. The largest answer is a HandedBack, which may
// have more than 30,000 ranks within this bound. When a HandedBack is read, the lease is already
// released.
const maxPostAnswer = 4 << 20

// ErrHandBack is the error if a region or group is not handed back.
var ErrHandBack = errors.New("the region is not handed back")

// AskBack asks the peer with this name to hand over a region or group that it holds. If it returns
// no error, the peer has stopped admitting requests there.
func (ps *Peers) AskBack(ctx context.Context, name string, ask HandBack) (h HandedBack, err error) {
	text, err := ps.post(ctx, name, HandBackPath, ask)
	if err != nil {
		return h, fmt.Errorf("%w: %w", ErrHandBack, err)
	}
	// The answer repeats the question.
	if err := json.Unmarshal(text, &h); err != nil || h.HandBack != ask {
		return h, fmt.Errorf("%w: %s answers for another region, group or epoch", ErrHandBack, name)
	}
	return h, nil
}

// AskVote asks the peer with this name for a promise not to admit requests itself for a while; nil:
// the peer has promised it.
func (ps *Peers) AskVote(ctx context.Context, name string, ask Vote) error {
	_, err := ps.post(ctx, name, VotePath, ask)
	return err
}

// post sends a question to the peer with this name, and returns the answer. Any status other than
// 200 is an error.
func (ps *Peers) post(ctx context.Context, name, path string, ask any) ([]byte, error) {
	target, recipient := ps.targetOf(name)
	if target == nil { // no peer has answered a probe with this name
		return nil, fmt.Errorf("%s is not among the peers that answer", name)
	}
	body, err := json.Marshal(ask)
	if err != nil {
		return nil, err
	}
	parts := [][]byte{body}
	call := ps.traffic.NewCall(target)
	stopAbort := context.AfterFunc(ctx, call.Abort)
	defer stopAbort()
	now := time.Now()
	message := &Message{Method: http.MethodPost, Target: path}
	var noInbound *Hop               // this proxy itself asks, so no request came here before
	rid := "owner-" + randomHex()    // stands for the id of a request, which every hop must have
	deadline := now.Add(time.Minute) // every hop must have a deadline, too, but only ctx ends the call
	hdr := ps.hopHeaders(message, parts, recipient, noInbound, rid, now, deadline)
	// There are no time limits, because ctx aborts the call.
	resp, err := call.Do(http.MethodPost, path, hdr, parts, engine.Deadlines{})
	if err != nil {
		return nil, err
	}
	defer resp.Close()
	text, err := resp.ReadAll(maxPostAnswer)
	switch {
	case err != nil:
		return nil, err
	case resp.StatusCode() != http.StatusOK:
		return nil, fmt.Errorf("%s answers %d, %s", name, resp.StatusCode(), text)
	}
	return text, nil
}

// targetOf finds the peer that calls itself by this name in its answers to probes. It returns the
// target of calls to the peer, or nil if there is no such peer. It also returns the peer, with its
// present process, as the recipient of a request.
func (ps *Peers) targetOf(name string) (*engine.Target, hopRecipient) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	for _, p := range ps.peers {
		if p.name == name {
			return p.target, hopRecipient{proxy: p.name, process: p.boot}
		}
	}
	return nil, hopRecipient{}
}
