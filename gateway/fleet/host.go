package fleet

import (
	"context"
	"time"

	"go.uber.org/zap"

	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/prefill"
	"evenkeel/prefill/local"
)

// Deps is what a Fleet needs of the proxy.
type Deps struct {
	Context  context.Context        // ends with the proxy
	Serving  func() context.Context // ends when requests that have no answer yet must end
	Started  time.Time
	Log      *zap.Logger
	Settings func() *Settings // in force
	Client   *engine.Client
	Monitor  *engine.Monitor
	Dispatch func(context.Context) board.Status
	// to all components that bind requests
	Publish func([]prefill.Candidate, []local.Rank, []board.Worker)
	// Gauged receives the KV tokens in use on a decode rank, and when this was true. It must not
	// block.
	Gauged func(worker int32, kvTokens int64, at time.Time)
}
