package gateway_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"evenkeel/bench/lab/refclient"
	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/detect"
	"evenkeel/gateway/live"
)

func TestOperatorsSeeEnginesThatDoBoth(t *testing.T) {
	t.Parallel()
	c := start(t, together(nil))
	up := time.Now()
	see := func() (d live.Document) {
		require.NoError(t, json.Unmarshal([]byte(c.get("/live?once").Body), &d))
		return d
	}
	// The page and top show ranks that do both as ranks, and not as prefill engines without load.
	t.Run("the page and top", func(t *testing.T) {
		_, route := c.Say(talk(`"stream":true,`, "hello"))
		require.Equal(t, "aggregated", route)
		c.Accounted()
		d := see()
		require.Len(t, d.Models, 1)
		require.Equal(t, model+" (aggregated)", d.Models[0].Name)
		require.True(t, d.Models[0].Aggregated)
		require.Len(t, d.Models[0].Groups[0].Ranks, 2)
		require.Empty(t, d.Prefill.Engines)
		require.Equal(t, []detect.PrefillGroup{{ID: "main of " + model + " (aggregated)", State: "open"}}, d.Prefill.Groups)
		require.Empty(t, d.Advice)
		require.Empty(t, since(up, d.Incidents))
		require.Empty(t, d.Decisions[0].Prefill)
		require.NotEmpty(t, d.Decisions[0].Rank)
	})
	// Engines that prefill and decode come, drain and go as others do, and whoever names no role means
	// one of them, too.
	t.Run("they come and go", func(t *testing.T) {
		late := c.Engine(refengine.Config{Role: refengine.Aggregated, DPSize: 2, DPMode: "internal"})
		c.Decode = append(c.Decode, late)
		address := refclient.AddressOf(late)
		worker := c.admin + "/workers/" + address
		add := fmt.Sprintf(`{"role":"aggregated","url":%q,"ranks":2,"group":"late","slots":8,"token_budget":4096,"prefill_schedule_interval":2}`, late.URLs()[0])
		require.Equal(t, http.StatusCreated, c.Ask("POST", c.admin+"/workers", add).Status)
		stop := c.KeepAsking(8)
		c.Eventually("it gets requests", func() bool { return late.Stats().Plain > 3 })

		for _, path := range []string{"", "/1", "%2F1"} { // the whole engine, and a rank
			require.Equal(t, http.StatusNoContent, c.Ask("POST", worker+path+"/drain", "").Status)
			c.Eventually("nothing is left on it", func() bool {
				drains := c.gw.Status(t.Context()).Drains
				return len(drains) == 1 && drains[0].State == "done" && drains[0].Role == "aggregated"
			})
			require.Equal(t, http.StatusNoContent, c.Ask("DELETE", worker+path+"/drain", "").Status)
			require.Equal(t, http.StatusNotFound, c.Ask("DELETE", worker+path+"/drain", "").Status, "it does not drain any more")
		}
		require.Equal(t, http.StatusNotFound, c.Ask("POST", worker+"/2/drain", "").Status)
		for _, bad := range []string{`{`, `{"deadline":"soon"}`, `{"deadline":"-1s"}`, `{"limit":"1s"}`} {
			require.Equal(t, http.StatusBadRequest, c.Ask("POST", worker+"/drain", bad).Status, bad)
		}
		require.Equal(t, http.StatusNoContent, c.Ask("DELETE", worker, "").Status)
		c.Eventually("it is gone", func() bool { return !strings.Contains(c.get("/workers").Body, address) })
		require.Equal(t, http.StatusNotFound, c.Ask("DELETE", worker, "").Status)

		var list struct {
			Prefill, Decode []string
			Aggregated      []string `json:"current_aggregated_instances"`
		}
		r := c.Ask("POST", c.admin+"/instances/add", fmt.Sprintf(`{"type":"aggregated","instances":[%q]}`, address))
		require.Equal(t, 200, r.Status, r.Body)
		require.NoError(t, json.Unmarshal([]byte(r.Body), &list))
		require.Contains(t, list.Aggregated, address)
		require.Equal(t, 200, c.Ask("POST", c.admin+"/instances/remove", fmt.Sprintf(`{"type":"aggregated","instances":[%q]}`, address)).Status)
		stop()
	})
	t.Run("readiness and incidents name them", func(t *testing.T) {
		require.Equal(t, 1, c.logs.FilterMessage("listening").FilterField(zap.Int("aggregated", 2)).Len())
		c.Decode[0].Kill()
		c.Eventually("it says which engines are missing", func() bool {
			r := c.get("/readyz")
			return r.Status == http.StatusServiceUnavailable && strings.HasPrefix(r.Body, "no healthy aggregated engine")
		})
		c.Eventually("no engine is left, and it says so", func() bool {
			return slices.ContainsFunc(see().Incidents, func(i detect.Incident) bool {
				return strings.Contains(strings.ToLower(i.What+i.Clients), "no aggregated engine takes prompts")
			})
		})
		c.Eventually("each rank is down, and not only out because its group waits for the other", func() bool {
			return !slices.ContainsFunc(see().Models[0].Groups[0].Ranks, func(r detect.Rank) bool { return r.State != detect.RankDown })
		})
	})
}
