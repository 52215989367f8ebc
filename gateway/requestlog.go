package gateway

import (
	"encoding/json"
	"io"
	"os"
	"sync"
	"time"

	"go.uber.org/zap"

	"evenkeel/gateway/edge"
	"evenkeel/gateway/keys"
	"evenkeel/gateway/receipt"
	"evenkeel/gateway/tracing"
)

// record is a line of the request log (architecture 5). It holds no prompt text
// and no tokens; `evenkeel fit` reads it.
type record struct {
	ID           string    `json:"id"`
	ClientID     string    `json:"client_id,omitempty"` // the client's own X-Request-Id
	TraceID      string    `json:"trace_id,omitempty"`
	Model        string    `json:"model"`
	Key          string    `json:"key"`
	PromptKey    string    `json:"prompt_key,omitempty"` // keyed hash, 16 hex digits, where the predictor tells prompts apart
	Arrival      time.Time `json:"arrival"`
	Prefill      string    `json:"prefill"`
	Rank         string    `json:"rank"`
	Policy       string    `json:"policy"`
	PromptTokens int       `json:"prompt_tokens"`
	CachedTokens int       `json:"cached_tokens"`
	Route        string    `json:"route,omitempty"`                // disaggregated or local-prefill; empty: no engine began
	LocalTokens  int       `json:"local_prefill_tokens,omitempty"` // that the decode rank had to compute, as predicted
	OutputTokens int       `json:"output_tokens"`
	ProbeBS      int       `json:"probe_bs"` // other probes on the prefill engine when this one was sent
	QueueMs      float64   `json:"queue_ms"`
	ProbeMs      float64   `json:"probe_ms"`
	WaitMs       float64   `json:"wait_ms"`
	TransferMs   float64   `json:"transfer_ms"`
	TTFTMs       float64   `json:"ttft_ms"`
	TotalMs      float64   `json:"total_ms"`
	Attempts     int       `json:"attempts"`
	Inexact      bool      `json:"inexact,omitempty"` // it went on by its text after a loss, which the engine tokenised anew
	Outcome      string    `json:"outcome"`
	Peer         string    `json:"peer,omitempty"`   // another dispatcher that it was sent to
	Origin       string    `json:"origin,omitempty"` // the one that it came from

	live    *receipt.Live // nil: no receipts are kept
	span    *tracing.Span // nil: there are no traces
	explain bool          // a trusted caller wants to know

	from    *hop   // how it came from there; nil: from a client
	route   string // where it was served; empty: nowhere
	stays   bool   // its client wants it to
	address string // of the client

	key      keys.Key
	priority int
	booked   int          // answers charged to key, given back at the end
	body     *edge.Charge // what the body takes of the account of those in memory
	metered  int          // tokens taken of its minute beforehand

	session       uint64 // hash of its name, 0: none
	prefillPolicy string // that a trusted caller asked for
	disaggregate  string // that a trusted caller asked for
	toPrefill     string // the candidate, and the decode rank, that a trusted caller named; none: any
	toDecode      []int32
	prefilledBy   string // the policy that chose
	hitTokens     int    // predicted by it
}

// requestLog writes records as JSON lines; a nil one writes nothing.
type requestLog struct {
	log  *zap.Logger
	mu   sync.Mutex
	w    io.Writer
	c    io.Closer
	lost int // lines in a row that could not be written
}

// openRequestLog opens path for appending; "-" is stdout, "" no log at all.
func openRequestLog(path string, log *zap.Logger) (*requestLog, error) {
	switch path {
	case "":
		return nil, nil
	case "-":
		return &requestLog{log: log, w: os.Stdout}, nil
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o640)
	if err != nil {
		return nil, err
	}
	return &requestLog{log: log, w: f, c: f}, nil
}

// write appends a record. If the log's reader has gone or its disk is full, this is
// logged once and not with every request.
func (l *requestLog) write(r *record) {
	if l == nil {
		return
	}
	line, err := json.Marshal(r)
	l.mu.Lock()
	defer l.mu.Unlock()
	if err == nil {
		_, err = l.w.Write(append(line, '\n')) // one write a line: lines of two processes do not mix
	}
	switch {
	case err != nil:
		if l.lost++; l.lost == 1 {
			l.log.Error("the request log cannot be written, its lines are lost until it can", zap.Error(err))
		}
	case l.lost > 0:
		l.log.Warn("the request log is written again", zap.Int("lines_lost", l.lost))
		l.lost = 0
	}
}

func (l *requestLog) close() error {
	if l == nil || l.c == nil {
		return nil
	}
	return l.c.Close()
}
