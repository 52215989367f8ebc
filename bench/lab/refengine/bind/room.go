package bind

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"math"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
)

// NoRank is the rank of a leg that names none. -1 is a name, and of no rank.
const NoRank = math.MinInt

// Room is where the two legs of a request to SGLang meet.
type Room struct {
	ID          int64  // -1: the request has no room
	Address     string // of the prefill engine's bootstrap server
	Rank        int    // that the leg names; NoRank: it names none
	PrefillRank int    // of the prefill engine, as the decode leg names it, -1 = none
	RID         string
	Fake        bool   // no other engine takes part
	Sampled     uint64 // of the members that have a part in the first token
}

// shaping are the members that have a part in an answer's first token. The prefill engine samples
// it, and the decode engine relies on that.
var shaping = []string{"temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
	"logit_bias",
	"min_tokens", "ignore_eos", "logprobs", "top_logprobs", "response_format", "regex", "ebnf", "json_schema"}

// ReadRoom reads the members of a body that say where its legs meet.
func ReadRoom(body map[string]json.RawMessage) (*Room, error) {
	r := &Room{ID: -1, Rank: NoRank, PrefillRank: -1}
	host, port := "", 0
	for _, m := range []struct {
		key string
		to  any
	}{{"bootstrap_host", &host}, {"bootstrap_port", &port}, {"bootstrap_room", &r.ID}, {"routed_dp_rank", &r.Rank},
		{"disagg_prefill_dp_rank", &r.PrefillRank}, {"rid", &r.RID}} {
		raw, ok := body[m.key]
		if !ok || string(raw) == "null" {
			continue
		}
		if err := json.Unmarshal(raw, m.to); err != nil {
			return nil, fmt.Errorf("%s: of the wrong type", m.key)
		}
	}
	switch {
	case r.ID < 0:
		return r, nil
	case host == "" || port <= 0:
		return nil, errors.New("bootstrap_host or bootstrap_port is missing")
	}
	r.Fake = host == FakeHost
	r.Address = net.JoinHostPort(host, strconv.Itoa(port))
	hash := fnv.New64a()
	for _, key := range shaping {
		if raw, ok := body[key]; ok {
			_, _ = fmt.Fprintf(hash, "%s=%s;", key, raw) // a hash takes all
		}
	}
	r.Sampled = hash.Sum64()
	return r, nil
}

// Running are the requests of an engine that can be aborted by their rid.
type Running struct{ list sync.Map }

type running struct {
	rid     string
	end     context.CancelFunc
	aborted atomic.Bool
}

// Enter has a request found by its rid until it leaves, and its context end when it is aborted.
func (l *Running) Enter(ctx context.Context, rid string) (within context.Context, leave func() (aborted bool)) {
	within, cancel := context.WithCancel(ctx)
	r := &running{rid: rid, end: cancel}
	l.list.Store(r, nil)
	return within, func() bool {
		l.list.Delete(r)
		cancel()
		return r.aborted.Load()
	}
}

// Abort ends all requests whose rid begins with prefix: an empty one begins them all.
func (l *Running) Abort(prefix string) {
	l.list.Range(func(key, _ any) bool {
		if r := key.(*running); strings.HasPrefix(r.rid, prefix) {
			r.aborted.Store(true)
			r.end()
		}
		return true
	})
}

// AppendReason tells why the answer ends: in every chunk, and by the token or text that matched.
func AppendReason(dst []byte, finish, matched string) []byte {
	if finish == "" {
		return append(dst, `,"finish_reason":null,"matched_stop":null`...)
	}
	if finish == "stop" && matched == "null" {
		matched = "2" // the end of the sequence
	}
	return fmt.Appendf(dst, `,"finish_reason":%q,"matched_stop":%s`, finish, matched)
}
