package gateway_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"

	"evenkeel/bench/refengine"
	"evenkeel/gateway/config"
	"evenkeel/geo"
)

// knock sends a request as the peer with that id would.
func (c *cluster) knock(id, path, body string) reply {
	keys, err := geo.ParseKeys(geoKey)
	require.NoError(c, err)
	now := time.Now()
	h := geo.Hop{N: 1, Max: 1, Origin: id, Via: []string{id}, RID: "r", Time: now.UnixMilli(), Nonce: fmt.Sprintf("%032x", now.UnixNano()), Deadline: now.Add(time.Minute).UnixMilli()}
	m := geo.Message{Method: http.MethodPost, Target: path, Tenant: "t", Body: [][]byte{[]byte(body)}}
	return c.ask(http.MethodPost, "http://"+c.gw.GeoAddr()+path, body, geo.HopHeader, h.String(), geo.TenantHeader, "t", geo.SignatureHeader, keys.Sign(&m, &h))
}

// alone is us-1 whose only peer is gone.
func alone(t *testing.T, more func(*config.Config)) *cluster {
	return start(t, options{configure: func(cfg *config.Config) {
		region(t, cfg, "us-1", "127.0.0.1:0", "eu-1", freePorts(t, 1)[0])
		if more != nil {
			more(cfg)
		}
	}})
}

func TestAModelThatNobodyInReachServes(t *testing.T) { // geo 10
	t.Parallel()
	us := alone(t, nil)
	us.hasEngines()
	got := us.post(chatPath, strings.Replace(chat("one", ""), model, "elsewhere", 1))
	require.Equal(t, http.StatusServiceUnavailable, got.status, got.body)
	require.Equal(t, "no_region_available", code(got.body), "eu-1 may have it")
	require.Equal(t, "1", got.header.Get("Retry-After"))
	require.Equal(t, http.StatusOK, us.post(chatPath, chat("one", "")).status)
}

func TestEnginesThatAreNotOursAreNone(t *testing.T) { // geo 10
	w := newWire(t, etcdServer(t))
	us := alone(t, func(cfg *config.Config) {
		o := &cfg.Geo.Ownership
		o.Engine, o.Etcd.Endpoints, o.Lease, o.StartDelay = config.OwnEtcd, []string{"http://" + w.at}, haLease, time.Second
	})
	us.hasEngines()
	require.Equal(t, http.StatusOK, us.post(chatPath, chat("one", "")).status)
	w.set(true)
	us.eventually("its time is over", func() bool { return us.gw.Owners()[0].Phase == "fenced" })
	got := us.post(chatPath, chat("one", ""))
	require.Equal(t, http.StatusServiceUnavailable, got.status, got.body)
	require.Equal(t, "no_region_available", code(got.body))
	us.eventually("calls fail again and again", func() bool { return us.logs.FilterMessageSnippet("a call of the lease's store").Len() > 0 })
	time.Sleep(haLease)
	require.Equal(t, 1, us.logs.FilterMessageSnippet("a call of the lease's store").Len())
	require.Zero(t, us.logs.FilterMessageSnippet("retrying").Len(), "nor does etcd's client warn with every call")
}

// code is an error's.
func code(body string) string {
	var e struct {
		Error struct{ Code string }
	}
	_ = json.Unmarshal([]byte(body), &e)
	return e.Error.Code
}

func TestARegionThatIsBusySaysSo(t *testing.T) { // geo R10
	t.Parallel()
	at := freePorts(t, 1)[0]
	eu := start(t, options{dirty: true, configure: func(cfg *config.Config) {
		region(t, cfg, "eu-1", at, "us-1", freePorts(t, 1)[0])
		cfg.Geo.Tau, cfg.Pool.Size = 0, 1
	}})
	eu.hasEngines()
	require.Equal(t, http.StatusOK, eu.knock("us-1", chatPath, chat("one", "")).status, "nothing waits")

	require.NoError(t, eu.prefill[0].SetFaults(refengine.Rule{Fault: refengine.Slow, DelayMS: 60_000}))
	jam := make(chan reply, 1)
	go func() { jam <- eu.post(chatPath, chat("jam", "")) }()
	eu.eventually("the only place is taken", func() bool { return eu.gw.Status(t.Context()).PoolUsed == 1 })
	next := eu.queued("", chat("next", ""))
	eu.eventually("one waits", func() bool { return eu.sum("evenkeel_prefill_queue_requests") == 1 })
	got := eu.knock("us-1", chatPath, chat("two", ""))
	require.Equal(t, http.StatusServiceUnavailable, got.status, got.body)
	require.Equal(t, "peer_busy", got.header.Get("X-Evenkeel-Reject"))
	require.Equal(t, "peer_busy", code(got.body))
	require.Equal(t, 1.0, eu.metric(`evenkeel_geo_rejects_total{reason="peer_busy"}`))
	require.NoError(t, eu.prefill[0].SetFaults())
	eu.prefill[0].Close()
	<-jam
	<-next
}

func TestARegionWithoutOwnersHandsNothingBack(t *testing.T) { // geo R36
	t.Parallel()
	us := alone(t, nil)
	for _, ask := range []string{`{"region":"us","epoch":1}`, `{"region":"us","group":"main","epoch":1}`} {
		got := us.knock("eu-1", geo.HandBackPath, ask)
		require.Equal(t, http.StatusConflict, got.status, got.body)
		require.Equal(t, "not_holder", code(got.body))
	}
	require.Equal(t, http.StatusBadRequest, us.knock("eu-1", geo.HandBackPath, "{").status)
}

// What ends gives back what it owns before it is gone: nobody waits until it
// would have expired (geo R38).
func TestWhatEndsReleasesWhatItOwns(t *testing.T) {
	t.Run("a region", func(t *testing.T) {
		store := etcdServer(t)
		us := alone(t, func(cfg *config.Config) {
			o := &cfg.Geo.Ownership
			o.Engine, o.Etcd.Endpoints, o.Lease, o.StartDelay = config.OwnEtcd, []string{"http://" + store}, haLease, time.Second
		})
		us.eventually("us-1 owns its region", func() bool { return us.gw.Owners()[0].Admits })
		require.True(t, strings.HasPrefix(kept(t, store, "evenkeel/owner/us/owner"), "us-1_"))
		require.NoError(t, us.gw.Shutdown(t.Context()))
		require.Empty(t, kept(t, store, "evenkeel/owner/us/owner"))
	})
	t.Run("a decode group", func(t *testing.T) {
		store := etcdServer(t)
		us := start(t, options{dirty: true, configure: func(cfg *config.Config) {
			region(t, cfg, "us-1", "127.0.0.1:0", "us-2", freePorts(t, 1)[0])
			h := &cfg.HA
			h.Mode, h.Engine, h.Etcd.Endpoints = config.HAStandby, config.OwnEtcd, []string{"http://" + store}
			for i := range cfg.Engines.Decode {
				cfg.Engines.Decode[i].Group = "main"
			}
			h.Lease, h.StartDelay = haLease, time.Second
		}})
		us.eventually("us-1 owns the group", func() bool { return groupOf(us, "main").Admits })
		require.True(t, strings.HasPrefix(kept(t, store, "evenkeel/group/main/owner"), "us-1_"))
		got := us.knock("us-2", geo.HandBackPath, fmt.Sprintf(`{"region":"us","group":"main","epoch":%d}`, groupOf(us, "main").Epoch))
		require.Equal(t, http.StatusConflict, got.status, "us-2 does not live, and is not to have it: %s", got.body)
		require.True(t, groupOf(us, "main").Admits)
		require.NoError(t, us.gw.Shutdown(t.Context()))
		require.Empty(t, kept(t, store, "evenkeel/group/main/owner"))
	})
}

// kept is what a key of the store says; empty: it is not there.
func kept(t *testing.T, store, key string) string {
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{"http://" + store}})
	require.NoError(t, err)
	defer func() { _ = c.Close() }()
	got, err := c.Get(t.Context(), key)
	require.NoError(t, err)
	if len(got.Kvs) == 0 {
		return ""
	}
	return string(got.Kvs[0].Value)
}
