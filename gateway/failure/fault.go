package failure

import (
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"

	"evenkeel/engine"
	"evenkeel/gateway/life"
	"evenkeel/gateway/openai"
	"evenkeel/sse"
)

// A Fault is a leg of an attempt that has ended without what it was for.
type Fault struct {
	life.Ended
	Answer     *openai.Error // what the client sees if it is not tried again
	Status     int           // that the engine answered; 0: none
	Err        error         // what failed, for the log
	Engine     string        // the monitor's id, if a call to the engine broke
	RetryAfter time.Duration
	Rooms      int // how often the engine may give a request back for want of KV memory
}

// Of is a leg that has ended with err, which may be nil.
func Of(end life.Ended, answer *openai.Error, err error) *Fault {
	return &Fault{Ended: end, Answer: answer, Err: err}
}

// Cause is why it failed, for receipts and spans.
func (f *Fault) Cause() string {
	if f.Err == nil {
		return f.Answer.Code
	}
	return f.Err.Error()
}

// Broke is the end of a leg whose call failed with err.
func Broke(leg life.Leg, err error) life.Ended {
	e := life.Ended{Leg: leg, Far: life.Sent, Why: life.Broke}
	var call *engine.Error
	switch {
	case errors.Is(err, sse.ErrSilent):
		e.Far, e.Why = life.Headed, life.Silent
		return e
	case !errors.As(err, &call): // what was read is not what it should be
		e.Far, e.Why = life.Headed, life.Garbled
		return e
	case !call.Sent:
		e.Far = life.Unsent
	case call.Answered:
		e.Far = life.Headed
	}
	switch {
	case call.Aborted || errors.Is(err, engine.ErrClosed):
		e.Why = life.HungUp
	case e.Far == life.Unsent && call.Phase == engine.PhaseConnect:
		e.Why = life.Unreachable
	case engine.WasSilent(err):
		e.Why = life.Silent
	}
	return e
}

// Status is the end of a leg whose engine answered with an error status. The engine's 4xx reach the client as they came. Its
// 5xx do not, nor does a refusal of our own credential.
func Status(log *zap.Logger, leg life.Leg, id string, resp *engine.Response, body []byte) *Fault {
	status, side := resp.StatusCode(), [...]string{life.Prefill: "prefill", life.Decode: "decode"}[leg]
	f := &Fault{
		Ended: life.Ended{Leg: leg, Far: life.Headed, Why: life.ByStatus(status)}, Status: status,
		Err:        Undelivered(fmt.Errorf("%s engine %s answered %d", side, id, status), string(body)),
		RetryAfter: time.Duration(RetryAfter(resp)) * time.Second,
	}
	f.Answer = Refused(log, side, id, resp, body)
	return f
}
