package dispatcher

import (
	"cmp"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"evenkeel/dispatcher/board"
	"evenkeel/pool"
	"evenkeel/predictor"
)

// Config is `dispatch` of the config file, and what Start needs beside it. The zero value
// of a field is its default where one is named.
type Config struct {
	board.Config `yaml:",inline"`
	DecisionLog  DecisionLogConfig `yaml:"log"` // zero: none is written

	Registerer prometheus.Registerer `yaml:"-"`
	// Places are those the entries hold, all but drains: Enqueue takes the
	// entry's over and it is released when the entry leaves the pool, whichever
	// way. nil = not counted.
	Places *pool.Places `yaml:"-"`
	// OnRoom is called at the end of a turn after which Room says more than before. It
	// must not block. nil = nobody is told.
	OnRoom func() `yaml:"-"`
	// EngineMetrics is asked for the metrics. nil = no engine is asked for its own.
	EngineMetrics func(worker int32) (s EngineMetrics, ok bool) `yaml:"-"`
	Log           *zap.Logger                                   `yaml:"-"`
}

// EngineMetrics is what an engine said of a rank when its metrics were last read. Below 0: it does not say so.
type EngineMetrics struct {
	Running, Waiting float64 // requests
	KVShare          float64 // of its KV memory, in use
}

// Default is what an empty config file says.
func Default() Config {
	return Config{Config: board.Default(), DecisionLog: DecisionLogConfig{MaxBytes: DefaultLogBytes}}
}

// Check tells bad of every setting of the config file that cannot work, as that of the
// boards does.
func (c *Config) Check(bad func(key, format string, args ...any)) {
	c.Config.Check(bad)
	if c.DecisionLog.MaxBytes < leastLogBytes {
		bad("dispatch.log.max_bytes", "%d; at least %d is needed", c.DecisionLog.MaxBytes, leastLogBytes)
	}
}

// DoubtFit says what of a fit file of this kind the policies do not read.
func (c *Config) DoubtFit(kind predictor.Kind) string {
	return c.Config.DoubtFit(kind, append([]string{c.Policy}, c.Twin...)...)
}

func (c Config) withDefaults() Config {
	c.Config, c.Log = c.Config.WithDefaults(), cmp.Or(c.Log, zap.NewNop())
	return c
}

// DecisionLogConfig has every round recorded, one JSON line each.
type DecisionLogConfig struct {
	File     string `yaml:"file"`      // "" = off
	MaxBytes int64  `yaml:"max_bytes"` // of the file and the older half, FILE.1, together; 0 = DefaultLogBytes
}

// Bounds of the decision log.
const (
	DefaultLogBytes = 256 << 20
	leastLogBytes   = 1 << 20 // in the config file: a round alone may take 300 KB
)
