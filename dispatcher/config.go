package dispatcher

import (
	"cmp"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"evenkeel/dispatcher/board"
	"evenkeel/pool"
)

// Config has the section `dispatch` of the config file, and what else Start needs. A field that is zero means the default that its comment
// names.
type Config struct {
	board.Config `yaml:",inline"`
	DecisionLog  DecisionLogConfig `yaml:"log"` // zero: no decision log is written

	Registerer prometheus.Registerer `yaml:"-"`
	// Places limits the number of entries in the pool; nil: there is no limit. The caller of Enqueue must have taken a place for its entry.
	// The dispatcher releases the place when the entry leaves the pool, with or without a slot. Discarded hand-offs and entries of
	// EnqueueLocal have no place.
	Places *pool.Semaphore `yaml:"-"`
	// OnRoom is called when Dispatcher.Room has become larger, after a round of decisions. It must not block. nil: nothing is called.
	OnRoom func() `yaml:"-"`
	// OnLosses is called when the hand-offs of a prefill engine are lost, so that it should get no prompts for a while and then one as a
	// trial. avoidFor 0: they arrive again. It must not block. nil: nothing is called.
	OnLosses func(prefiller string, avoidFor time.Duration) `yaml:"-"`
	// EngineMetrics returns what the engine of a worker reports, for the Prometheus gauges of its rank; ok is false if nothing is known. nil:
	// these gauges do not exist.
	EngineMetrics func(worker int32) (s EngineMetrics, ok bool) `yaml:"-"`
	Log           *zap.Logger                                   `yaml:"-"`
}

// EngineMetrics are the values of a rank from the last read of its engine's metrics. Below 0: the engine does not report the value.
type EngineMetrics struct {
	Running, Waiting float64 // requests in the engine's batch, and in its queue
	KVShare          float64 // share of the rank's KV memory that is in use, 0 to 1
}

// Default returns the settings that an empty config file stands for.
func Default() Config {
	return Config{Config: board.Default(), DecisionLog: DecisionLogConfig{MaxBytes: DefaultLogBytes}}
}

// Check calls bad for every setting of the section dispatch that cannot work, with its key. It includes what board.Config.Check finds.
func (c *Config) Check(bad func(key, format string, args ...any)) {
	c.Config.Check(bad)
	if c.DecisionLog.MaxBytes < leastLogBytes {
		bad("dispatch.log.max_bytes", "%d; at least %d is needed", c.DecisionLog.MaxBytes, leastLogBytes)
	}
}

// withDefaults fills in the defaults of board.Config, and a Log that writes nothing if there is none.
func (c Config) withDefaults() Config {
	c.Config, c.Log = c.Config.WithDefaults(), cmp.Or(c.Log, zap.NewNop())
	return c
}

// DecisionLogConfig sets up the decision log, a file with one JSON line for every round.
type DecisionLogConfig struct {
	File string `yaml:"file"` // path of the file; empty: no decision log is written
	// MaxBytes is the size limit of the file and of FILE.1 together, in bytes; FILE.1 has the older lines. 0: DefaultLogBytes.
	MaxBytes int64 `yaml:"max_bytes"`
}

// Sizes of the decision log, in bytes.
const (
	DefaultLogBytes = 256 << 20
	leastLogBytes   = 1 << 20 // smallest max_bytes of the config file: one round may take 300 KB
)
