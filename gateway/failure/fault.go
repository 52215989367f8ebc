package failure

import (
	"errors"
	"net/http"
	"time"

	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/openai"
)

// A Fault is a leg of an attempt that has ended without what it was for.
type Fault struct {
	lifecycle.Ended
	Answer     *openai.Error // what the client sees if it is not tried again
	Status     int           // that the engine answered; 0: none
	Err        error         // what failed, for the log
	Engine     string        // the monitor's id, if it is to hear of the engine: a call broke, or the engine said something of itself
	RetryAfter time.Duration
	Rooms      int // how often the engine may give a request back for want of KV memory
}

// ErrMoved is why a call ended whose engine was taken out of service.
var ErrMoved = errors.New("the engine was taken out of service")

// Of is a leg that has ended with err, which may be nil.
func Of(end lifecycle.Ended, answer *openai.Error, err error) *Fault {
	return &Fault{Ended: end, Answer: answer, Err: err}
}

// Useless is a leg whose engine has answered with status 200, and whose answer cannot be used.
func Useless(leg lifecycle.Leg, why lifecycle.Why, answer *openai.Error, err error) *Fault {
	return &Fault{Ended: lifecycle.Ended{Leg: leg, Far: lifecycle.Headed, Why: why, Open: true}, Answer: answer, Status: http.StatusOK, Err: err}
}

// OfEngine says that the leg's engine is known to have failed at it. KV that did not arrive is either engine's fault.
func (f *Fault) OfEngine() bool {
	return f != nil && f.Ended.OfEngine() && !errors.Is(f.Err, ErrUndelivered)
}

// Cause is why it failed, for receipts and spans.
func (f *Fault) Cause() string {
	if f.Err == nil {
		return f.Answer.Code
	}
	return f.Err.Error()
}
