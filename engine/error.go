package engine

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/http"
)

// Sentinels behind an Error; test with errors.Is.
var (
	ErrAborted   = errors.New("call aborted")
	ErrClosed    = errors.New("client is closed")
	ErrRefused   = errors.New("request refused before it was sent")       // a header, path or target that must not reach the wire
	ErrMalformed = errors.New("engine's answer is not valid HTTP/1.1")    // it quotes no bytes: they may be of a client's answer
	ErrTooLarge  = errors.New("engine's answer is larger than the limit") // head over Options.ReadBuffer, or body over ReadAll's limit
)

// Phase is how far a call had come when it failed.
type Phase uint8

// The phases of a call, in order.
const (
	PhaseRequest Phase = iota // the request was refused here, nothing was dialled
	PhaseConnect              // name lookup, TCP, TLS handshake
	PhaseWrite                // the request was not fully written
	PhaseHead                 // written; no complete response head yet
	PhaseBody                 // the response body broke off
)

var phases = [...]string{"check request", "connect", "write request", "read response head", "read response body"}

func (p Phase) String() string {
	if int(p) < len(phases) {
		return phases[p]
	}
	return fmt.Sprintf("Phase(%d)", uint8(p))
}

// Error has what a caller needs to decide about a retry: whether the engine can have seen the request, and whether it
// had begun to answer.
type Error struct {
	Target   string // Target.ID
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

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// Stale reports that a kept-alive connection broke before a response byte came. Most likely the engine had closed it
// while it was idle. But if the Error is Sent, the request may also have run: a POST goes again only as a new
// request.
func (e *Error) Stale() bool {
	return e.Reused && !e.Answered && !e.Timeout && !e.Aborted && (e.Phase == PhaseWrite || e.Phase == PhaseHead)
}

func isTimeout(err error) bool {
	var t net.Error
	return errors.As(err, &t) && t.Timeout()
}

// StatusError is an answer whose HTTP status was not the wanted one.
type StatusError struct {
	Target string
	Method string // empty: GET
	Path   string
	Status int
	Why    error // the reason that the engine gave, if evenkeel knows it; nil: it is another one
}

func (e *StatusError) Error() string {
	s := fmt.Sprintf("engine %s: %s %s answered %d %s", e.Target, cmp.Or(e.Method, http.MethodGet), e.Path, e.Status,
		http.StatusText(e.Status))
	if cause := e.Unwrap(); cause != nil {
		s += ": " + cause.Error()
	}
	return s
}

// Unwrap returns the known reason, or ErrCredential for a 401 or 403.
func (e *StatusError) Unwrap() error {
	if e.Why != nil {
		return e.Why
	}
	if e.Status == http.StatusUnauthorized || e.Status == http.StatusForbidden {
		return ErrCredential
	}
	return nil
}

// ErrCredential is in Status.Err while an engine refuses our API key. Every request would fail, so the engine counts
// as down.
var ErrCredential = errors.New("the engine refused the proxy's API key; check api_key_env of its profile")
