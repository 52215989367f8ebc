package engine

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestWhereAnEngineSaysThatItPublishes(t *testing.T) {
	for _, tt := range []struct {
		name, body string
		want       []Publisher
		fails      string
	}{
		{"two ranks of vLLM 0.33", `{"1":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5558","replay_endpoint":"tcp://*:6001","buffer_steps":10000,"hwm":100000,"max_queue_size":100000,"topic":""},
			"0":{"endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:6000"}}`,
			[]Publisher{{0, HostPort{"", 5557}, HostPort{"", 6000}}, {1, HostPort{"", 5558}, HostPort{"", 6001}}}, ""},
		{"a port that the system chose", `{"3":{"endpoint":"tcp://10.0.0.7:41233","replay_endpoint":null}}`, []Publisher{{3, HostPort{"10.0.0.7", 41233}, HostPort{}}}, ""},
		{"all addresses", `{"0":{"endpoint":"tcp://0.0.0.0:1"},"1":{"endpoint":"tcp://[::]:2"}}`, []Publisher{{0, HostPort{"", 1}, HostPort{}}, {1, HostPort{"", 2}, HostPort{}}}, ""},
		{"nothing is published", `{}`, nil, ""},
		{"no object", `[1]`, nil, "not a publisher for each rank"},
		{"a rank that is none", `{"-1":{"endpoint":"tcp://*:1"}}`, nil, `a rank says "-1"`},
		{"a rank without a number", `{"x":{"endpoint":"tcp://*:1"}}`, nil, `a list of ranks says "x" among 1`},
		{"no port yet", `{"0":{"endpoint":"tcp://*:0"}}`, nil, `endpoint says "tcp://*:0", which no other host reaches`},
		{"a port that is none", `{"0":{"endpoint":"tcp://*:70000"}}`, nil, "which no other host reaches"},
		{"a socket of the host", `{"0":{"endpoint":"ipc:///tmp/events"}}`, nil, "give the engine an address like tcp://*:5557"},
		{"replays within the process", `{"0":{"endpoint":"tcp://*:1","replay_endpoint":"inproc://replay"}}`, nil, `replay_endpoint says "inproc://replay"`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := parsePublishers([]byte(tt.body))
			if tt.fails != "" {
				require.ErrorContains(t, err, tt.fails)
				return
			}
			require.NoError(t, err)
			require.Equal(t, tt.want, got)
		})
	}
}

func TestAnEngineWithoutThePathHasNoPublishers(t *testing.T) {
	for raw, fails := range map[string]string{
		status(404):  "",
		ok(`{}`):     "",
		status(500):  "answered 500",
		ok(`<html>`): "engine e0: GET /kv_event_sources: the answer is not a publisher for each rank",
	} {
		c, tg := listen(t, once(raw))
		all, err := Publishers(t.Context(), c, tg)
		require.Empty(t, all)
		if fails == "" {
			require.NoError(t, err)
		} else {
			require.ErrorContains(t, err, fails)
		}
	}
}

func FuzzPublishers(f *testing.F) {
	f.Add([]byte(`{"0":{"endpoint":"tcp://*:5557","replay_endpoint":"tcp://[::1]:6000"},"1":{"endpoint":"tcp://10.0.0.7:41233"}}`))
	f.Add([]byte(`{"9223372036854775807":{"endpoint":"tcp://*:5557"}}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		all, err := parsePublishers(body)
		if err != nil {
			return
		}
		for i, p := range all {
			require.True(t, p.Rank >= 0 && p.Rank <= math.MaxInt32 && p.Events.Port > 0 && p.Events.Port < 1<<16 && p.Replay.Port >= 0 &&
				p.Replay.Port < 1<<16, "%+v", p)
			require.True(t, i == 0 || all[i-1].Rank <= p.Rank, "%+v", all)
		}
	})
}
