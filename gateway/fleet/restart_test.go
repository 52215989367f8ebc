package fleet

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

// A name that leads to another host leads to another process, which has none of the KV: once, however the two are told apart then.
func TestANameThatMovesLeadsToAnotherProcess(t *testing.T) {
	cfg := config.Default()
	cfg.Profiles = map[string]mooncake.Profile{"a": {}}
	f := of(t, cfg)
	require.NoError(t, f.Add(Prefill, config.Engine{URL: "http://engine.test:80", Profile: "a"}))
	key := f.Now().Engines()[0].Key()
	f.OnStatus(key, engine.Status{Up: true, StartTime: 1})
	before := f.Now().Born(key)
	moved := engine.Moved{From: "10.0.0.1", To: "10.0.0.2", At: time.Unix(100, 0)}
	f.OnStatus(key, engine.Status{StartTime: 1, Moved: moved})
	gone, sure := f.Now().Outlived(before)
	require.True(t, gone && sure)
	require.Equal(t, moved, *f.Now().Statuses()[0].Moved)
	after := f.Now().Born(key)
	f.OnStatus(key, engine.Status{Up: true, StartTime: 2, Moved: moved})
	gone, _ = f.Now().Outlived(after)
	require.False(t, gone, "it is the process that was meant")
}
