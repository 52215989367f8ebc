package dispatcher

import (
	"cmp"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"evenkeel/dispatcher/board"
	"evenkeel/pool"
)

// Config has the section `dispatch` of the config file, and what else Start needs. A field that is
// zero means the default that its comment names.
type Config struct {
	board.Config `yaml:",inline"`
	DecisionLog  DecisionLogConfig `yaml:"log"` // zero: none

	Registerer prometheus.Registerer `yaml:"-"`
	// Places limits the number of entries in the pool; nil: no limit. The caller of Enqueue must have
	// taken a place, and the dispatcher releases it when the entry leaves the pool. Discarded
	// hand-offs and entries of EnqueueLocal have none.
	Places *pool.Semaphore `yaml:"-"`
	// OnRoom is called when Dispatcher.Room has become larger. It must not block. May be nil.
	OnRoom func() `yaml:"-"`
	// OnLosses is called when the hand-offs of a prefill engine are lost, so that it should get no
	// prompts for a while. avoidFor 0: they arrive again. It must not block. May be nil.
	OnLosses func(prefiller string, avoidFor time.Duration) `yaml:"-"`
	// EngineMetrics returns what the engine of a worker reports, for the gauges of its rank. nil:
	// these gauges do not exist.
	EngineMetrics func(worker int32) (s EngineMetrics, ok bool) `yaml:"-"`
	Log           *zap.Logger                                   `yaml:"-"`
}

// EngineMetrics are what an engine reports of one rank. Below 0: it does not report the value.
type EngineMetrics struct {
	Running, Waiting float64 // requests in its batch, and in its queue
	KVShare          float64 // share of the rank's KV memory in use, 0 to 1
}

// Default is what an empty config file stands for.
func Default() Config {
	return Config{Config: board.Default(), DecisionLog: DecisionLogConfig{MaxBytes: DefaultLogBytes}}
}

// Check calls bad for every setting of the section dispatch that cannot work, with its key.
func (c *Config) Check(bad func(key, format string, args ...any)) {
	c.Config.Check(bad)
	if c.DecisionLog.MaxBytes < leastLogBytes {
		bad("dispatch.log.max_bytes", "%d; at least %d is needed", c.DecisionLog.MaxBytes, leastLogBytes)
	}
}

func (c Config) withDefaults() Config {
	c.Config, c.Log = c.Config.WithDefaults(), cmp.Or(c.Log, zap.NewNop())
	return c
}

// DecisionLogConfig sets up the decision log, a file with one JSON line for every round.
type DecisionLogConfig struct {
	File string `yaml:"file"` // empty: no decision log is written
	// MaxBytes bounds the file and FILE.1, which has older lines, together. 0: DefaultLogBytes.
	MaxBytes int64 `yaml:"max_bytes"`
}

// Sizes of the decision log, in bytes.
const (
	DefaultLogBytes = 256 << 20
	leastLogBytes   = 1 << 20 // least max_bytes of the config file: one round may take 300 KB
)
