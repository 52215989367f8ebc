// Package request serves one request: it has an engine prefill the prompt, waits for a
// decode rank, relays that rank's answer, and gives back what the request took, however
// it ends. What is done when is decided in gateway/life. run.go, which carries that out, is the
// place to start reading.
package request

import (
	"fmt"
	"time"

	"go.uber.org/zap/zapcore"

	"evenkeel/gateway/fleet"
	"evenkeel/gateway/handoff"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/life"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/prompt"
	"evenkeel/gateway/recording"
	"evenkeel/geo"
	"evenkeel/mooncake"
	"evenkeel/sse"
)

// A job is one prompt that becomes one PD request: a client's request, or one
// leg of a fan-out. serve is its life. How far it has come, what it holds
// and where it may still be served stands in gateway/life.
type job struct {
	srv    *Server
	req    *openai.Request
	body   mooncake.Body // dropped once a decode engine has it
	leg    *mooncake.Leg // what a leg of a fan-out changes in the body
	client reader
	id     string // request id, the stem of the engines' ids
	model  fleet.Route
	arrive time.Time
	ask    sse.Ask
	in     *Incoming
	told   *journal.Request // of in; of a leg, its own

	prompt int // tokens as the prefill engine counted them; of a resumed request with the answer so far
	cached int // of these, found in its prefix cache; -1 unknown
	stay   stay

	life     life.Life
	tape     recording.Tape
	question *geo.Question // where it goes, if there are other regions and that is open
	ran      int           // proxies of this region that may have served it, and gave it back

	avoid avoided
	local locally

	doubts  []*handoff.Handoff // that an engine may have read, and no answer was made of them
	resume  resumption
	charges []func(life.Finding) // 500s of engines, until it is known whose they are
}

// client is the connection the answer goes to: edge.Conn, or a fan-out's share
// of one.
type client interface {
	Left() bool
	Gone() <-chan struct{}
	GoneAt() time.Time
	OnGone(func())
}

// MarshalLogObject names the job in the log.
func (j *job) MarshalLogObject(enc zapcore.ObjectEncoder) error {
	enc.AddString("id", j.id)
	if j.told.TraceID != "" {
		enc.AddString("trace_id", j.told.TraceID)
	}
	return nil
}

// parts are what of the request make its prompt.
func (j *job) parts() *prompt.Parts {
	return &prompt.Parts{Req: j.req, Body: &j.body, Leg: j.leg, Model: j.model, Resumed: j.life.Resumed()}
}

// promptHash tells prompts apart; 0 where nobody does. The request log has it for
// `evenkeel fit`.
func (j *job) promptHash() uint64 {
	key := j.srv.PromptKey()
	if key == nil {
		return 0
	}
	hash := j.parts().Hash(key)
	if !j.client.isLeg() { // the legs of one request have one line, and their prompts one by one
		j.told.PromptKey = fmt.Sprintf("%016x", hash)
	}
	return hash
}
