package engine

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"syscall"

	"evenkeel/sse"
)

// Causes of an Error, for errors.Is.
var (
	ErrAborted = errors.New("call aborted")
	ErrClosed  = errors.New("client is closed")
	// A header, path or target is not safe to send.
	ErrRefused = errors.New("request refused before it was sent")
	// It quotes no bytes, which may be of a client's answer.
	ErrMalformed = errors.New("engine's answer is not valid HTTP/1.1")
	// The head is over Options.ReadBuffer, or the body over ReadAll's limit.
	ErrTooLarge = errors.New("engine's answer is larger than the limit")
)

// Phase is how far a call had come when it failed.
type Phase uint8

// The phases, in their order.
const (
	PhaseRequest Phase = iota // refused by the client itself
	PhaseConnect              // name look-up, TCP or TLS failed
	PhaseWrite                // not fully written
	PhaseHead                 // no complete response head came
	PhaseBody
)

var phases = [...]string{"check request", "connect", "write request", "read response head", "read response body"}

func (p Phase) String() string {
	if int(p) < len(phases) {
		return phases[p]
	}
	return fmt.Sprintf("Phase(%d)", uint8(p))
}

// Error has the facts by which a caller decides about a retry: whether the engine may have seen the
// request, and whether it had begun to answer.
type Error struct {
	Target   string // the ID of the target
	Phase    Phase
	Sent     bool // request bytes may have reached the engine
	Answered bool // at least one response byte came
	Timeout  bool // a deadline of this phase passed
	Aborted  bool // Abort was called, or the context of Get ended
	Reused   bool // the connection had served a request before
	Err      error
}

func (e *Error) Error() string {
	note := ""
	if e.Stale() {
		note = " (the kept-alive connection was stale)"
	}
	return fmt.Sprintf("engine %s: %s: %v%s", e.Target, e.Phase, e.Err, note)
}

func (e *Error) Unwrap() error { return e.Err }

// Stale reports that a reused connection broke before a response byte came: most likely the engine
// had closed it while it was idle. If Sent is true, the engine may have run the request, so Do does
// not repeat a POST by itself.
func (e *Error) Stale() bool {
	endedByProxy := e.Timeout || e.Aborted
	inExchange := e.Phase == PhaseWrite || e.Phase == PhaseHead
	return e.Reused && !e.Answered && !endedByProxy && inExchange
}

func isTimeout(err error) bool {
	var t net.Error
	return errors.As(err, &t) && t.Timeout()
}

// outOfSockets are errors of a process or machine without sockets, to any address.
var outOfSockets = []error{syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS}

// isOwnFault: the proxy has no file descriptor or memory left, which says nothing about the engine.
func isOwnFault(err error) bool {
	return slices.ContainsFunc(outOfSockets, func(one error) bool { return errors.Is(err, one) })
}

// StatusError is an answer with an unexpected HTTP status.
type StatusError struct {
	Target string
	Method string // empty: GET
	Path   string
	Status int
	Why    error // by the engine; nil: not known
}

func (e *StatusError) Error() string {
	s := fmt.Sprintf("engine %s: %s %s answered %d %s", e.Target, cmp.Or(e.Method, http.MethodGet), e.Path, e.Status,
		http.StatusText(e.Status))
	if cause := e.Unwrap(); cause != nil {
		s += ": " + cause.Error()
	}
	return s
}

// Unwrap returns Why or, for a 401 or 403 without it, ErrCredential.
func (e *StatusError) Unwrap() error {
	if e.Why != nil {
		return e.Why
	}
	if e.Status == http.StatusUnauthorized || e.Status == http.StatusForbidden {
		return ErrCredential
	}
	return nil
}

// ErrCredential is in Status.Err while an engine refuses the proxy's API key. It counts as down
// then, because every request would fail.
var ErrCredential = errors.New("the engine refused the proxy's API key; check api_key_env of its profile")

// WasSilent says that an engine took a request and then sent nothing within a time limit.
func WasSilent(err error) bool {
	if errors.Is(err, sse.ErrSilent) {
		return true
	}
	var callErr *Error
	// In earlier phases the request was not written.
	return errors.As(err, &callErr) && callErr.Timeout && callErr.Phase >= PhaseHead
}
