package selftest

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"time"

	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/lifecycle"
	"evenkeel/mooncake"
)

// compareSettings compares the settings of an engine's start command, as the engine reports them,
// with the config, where a difference does harm.
func (t *tester) compareSettings(ctx context.Context, role string, s testedRank, e config.Engine) {
	switch {
	case s.profile.Connector == mooncake.SGLang:
		t.compareSGLang(ctx, s, e)
	case s.profile.Aggregated:
		t.compareVLLM(ctx, s, e)
	default:
		t.compareSplit(ctx, role, s, e)
	}
}

// serverInfo reads the settings that an engine reports, and stores them in into. It returns false
// if the engine reports none.
func (t *tester) serverInfo(ctx context.Context, s testedRank, into any) bool {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	// Without this query vLLM would answer with plain text.
	status, body, err := t.client.Get(ctx, s.target, "/server_info?config_format=json", answerBytes)
	return err == nil && status == http.StatusOK && json.Unmarshal(body, into) == nil
}

// compareSGLang warns of a server with elastic EP, which goes on without a rank whose GPU has
// failed: a request that names such a rank ends the server, and most of the server's own methods to
// choose a rank choose such a rank, too. It also warns of a server that holds prompts back itself,
// because evenkeel does the same.
func (t *tester) compareSGLang(ctx context.Context, s testedRank, e config.Engine) {
	if s.target.Rank < 0 && !s.profile.Aggregated { // the engine has only one rank
		return
	}
	namesRanks := s.profile.NamedRank(s.target.Rank) >= 0
	var reported struct {
		Backend string `json:"elastic_ep_backend"`
		Balance string `json:"load_balance_method"`
		engine.Holds
	}
	answered := t.serverInfo(ctx, s, &reported)
	elasticEP := reported.Backend != ""
	if elasticEP && namesRanks {
		t.report(s.name, Warn, "runs with elastic EP (--elastic-ep-backend): if one of its GPUs fails, the next request that names the rank "+
			"ends the whole server; set name_ranks: false in its profile")
	}
	choosesFailedRanks := reported.Balance != "" && reported.Balance != "round_robin"
	if elasticEP && !namesRanks && choosesFailedRanks {
		t.report(s.name, Warn, "runs with elastic EP (--elastic-ep-backend) and chooses ranks by %s, "+
			"which also chooses ranks whose GPU has failed; start it with --load-balance-method round_robin", reported.Balance)
	}
	switch {
	case !s.profile.Aggregated: // only servers that also decode hold prompts back
	case !answered:
		t.report(s.name, OK, "does not tell whether it holds prompts back itself (--enable-prefill-delayer, --min-free-slots-delay): GET "+
			"/server_info gives no answer")
	default:
		flags, remedies := reported.Flags(e.Slots)
		for i := range flags {
			t.report(s.name, Warn, "holds prompts back itself (%s). evenkeel holds them, too, and one hold is enough; %s", flags[i], remedies[i])
		}
		switch interval, err := reported.Interval(); {
		case err != nil:
			t.report(s.name, Warn, "does not tell its prefill_decode_interval: %v", err)
		case interval != max(1, e.Interval):
			t.report(s.name, Warn, "was started with --prefill-decode-interval %d (or chose it itself), and the config says "+
				"prefill_schedule_interval: %d; write %d", interval-1, max(1, e.Interval), interval)
		}
	}
}

// reportedNumber returns a number that an engine reports about itself; 0: the engine reports no
// number, or one that cannot be right. It adds a finding about a number that cannot be right. most
// is the largest number that can be.
func (t *tester) reportedNumber(s testedRank, n engine.Number, name string, most int64) int {
	value, err := n.Whole(name, most)
	if err != nil {
		// Each name has a format of its own, because report takes findings of equal format for the same
		// finding.
		t.report(s.name, Warn, "does not tell its "+name+": %v", err)
	}
	return value
}

// vllmSettings are the settings with which vLLM was started. vLLM reports them only with
// VLLM_SERVER_DEV_MODE=1.
type vllmSettings struct {
	Config struct {
		Transfer struct {
			Role  string `json:"kv_role"`
			Extra struct {
				HandsBack engine.Number `json:"bidirectional_kv_xfer"`
				TTL       engine.Number `json:"decoder_kv_blocks_ttl"`
			} `json:"kv_connector_extra_config"`
		} `json:"kv_transfer_config"`
		Scheduler struct {
			Slots    engine.Number `json:"max_num_seqs"`
			Budget   engine.Number `json:"max_num_batched_tokens"`
			Interval engine.Number `json:"prefill_schedule_interval"`
		} `json:"scheduler_config"`
	} `json:"vllm_config"`
}

// compareSplit compares the settings of a vLLM engine that only prefills or only decodes.
func (t *tester) compareSplit(ctx context.Context, role string, s testedRank, e config.Engine) {
	var reported vllmSettings
	if !t.serverInfo(ctx, s, &reported) {
		return
	}
	nixl := s.profile.Connector == mooncake.NIXLPull || s.profile.Connector == mooncake.NIXLPush
	if nixl && reported.Config.Transfer.Role == "kv_both" {
		t.report(s.name, Warn, "was started with kv_role kv_both, which vLLM deprecates for NIXL; start prefill engines with kv_producer and "+
			"decode engines with kv_consumer")
	}
	if role == "decode" {
		if extra := &reported.Config.Transfer.Extra; extra.HandsBack == "true" {
			t.reportKVKept(s, true)
			ttl, counted := t.reportedNumber(s, extra.TTL, "decoder_kv_blocks_ttl", engine.MostStep), s.profile.Keeps()
			bothKnown := ttl > 0 && counted > 0 // ttl is in seconds
			if bothKnown && time.Duration(ttl)*time.Second != counted {
				t.report(s.name, Warn, "was started with decoder_kv_blocks_ttl %d, and its profile says %v; write decoder_kv_blocks_ttl: %[1]ds", ttl,
					counted)
			}
		}
		t.compareSlots(s, e, &reported)
	}
}

// compareSlots compares a decode engine's max_num_seqs (how many requests it runs at once) with its
// slots in the config. vLLM looks at waiting requests, to fetch their KV, only while it runs fewer
// than max_num_seqs.
func (t *tester) compareSlots(s testedRank, e config.Engine, reported *vllmSettings) {
	switch runs := t.reportedNumber(s, reported.Config.Scheduler.Slots, "max_num_seqs", engine.MostRequests); {
	case runs == 0 || e.Slots == 0: // one of the two is not known
	case runs < e.Slots:
		t.report(s.name, Warn, "was started with --max-num-seqs %d, and the config says slots: %d, so that requests wait inside the engine; "+
			"write at most %[1]d", runs, e.Slots)
	case runs == e.Slots && !s.profile.Early():
		t.report(s.name, OK, "was started with --max-num-seqs %d, which is its slots. "+
			"A request that is sent ahead of its slot pulls its KV only when an answer has ended; start the engine with two to four more", runs)
	}
}

// fewTokens is the smallest number of tokens in a step that is known to help:
// docs/results/deployments.md.
const fewTokens = 2048

// compareVLLM compares the limits of an engine step in the config with those of the engine's start
// command. evenkeel decides by the limits in the config how much it sends to an aggregated engine.
func (t *tester) compareVLLM(ctx context.Context, s testedRank, e config.Engine) {
	var reported vllmSettings
	if !t.serverInfo(ctx, s, &reported) {
		t.report(s.name, OK, "does not tell its --max-num-seqs, --max-num-batched-tokens and --prefill-schedule-interval (vLLM does with "+
			"VLLM_SERVER_DEV_MODE=1); the config says slots: %d, token_budget: %d and prefill_schedule_interval: %d", e.Slots, e.Budget, e.Interval)
		return
	}
	scheduler := &reported.Config.Scheduler
	slots := t.reportedNumber(s, scheduler.Slots, "max_num_seqs", engine.MostRequests)
	budget := t.reportedNumber(s, scheduler.Budget, "max_num_batched_tokens", engine.MostStep)
	if budget > fewTokens && e.Barrier != config.BarrierNone {
		t.report(s.name, OK, "computes up to %d tokens in a step (--max-num-batched-tokens). With fewer, down to %d, a rank's long prompt makes the "+
			"others wait for less time, with evenkeel and without it; evenkeel survey simulates what other numbers would bring", budget, fewTokens)
	}
	for _, key := range []struct {
		name, flag           string
		reported, configured int
	}{
		{"slots", "max-num-seqs", slots, e.Slots},
		{"token_budget", "max-num-batched-tokens", budget, e.Budget},
		{"prefill_schedule_interval", "prefill-schedule-interval",
			cmp.Or(t.reportedNumber(s, scheduler.Interval, "prefill_schedule_interval", engine.MostStep), 1), cmp.Or(e.Interval, 1)},
	} {
		if key.reported > 0 && key.reported != key.configured {
			but := ""
			if key.configured == 1 && key.name == "prefill_schedule_interval" {
				but = ", but not for a rank that steps alone and is older than vLLM 0.33: it ignores this flag"
			}
			t.report(s.name, Warn, "was started with --"+key.flag+" %d, and the config says "+key.name+": %d; write %[1]d%[3]s",
				key.reported, key.configured, but)
		}
	}
}

// fixRankNumber finds out which number the header X-data-parallel-rank must have for the first rank
// of a node under hybrid load balancing. The node's metrics show the rank's number in the whole
// deployment. Rust front ends of vLLM expect this number. Python front ends count the ranks of each
// node from 0. Each answers 400 to the other number. If the number in the config is wrong,
// fixRankNumber reports it, and the test goes on with the number that the engine accepts.
func (t *tester) fixRankNumber(ctx context.Context, s *testedRank, e config.Engine, sample *engine.Sample) {
	if sample == nil || sample.FirstRank == 0 { // unknown, or the first node, whose ranks have the same numbers in both ways
		return
	}
	namesRanks := e.Ranks > 0 && s.profile.DPMode == mooncake.DPHybrid
	if !namesRanks || len(s.models) == 0 { // without a model, nothing can be asked
		return
	}
	acceptsLocal, acceptsGlobal := t.acceptsNumber(ctx, s, 0), t.acceptsNumber(ctx, s, sample.FirstRank)
	if acceptsLocal == acceptsGlobal { // both fail for another reason, or both pass because the engine ignores the header
		return
	}
	first := 0
	if acceptsGlobal {
		first = sample.FirstRank
	}
	if first != e.First {
		t.report(s.name, Bad, "it refuses the ranks that evenkeel names: its ranks begin at %d in the header X-data-parallel-rank, and not at "+
			"%d; set first_rank: %d of this engine", first, e.First, first)
		target := *s.target
		target.First = first
		s.target = &target
	}
}

// acceptsNumber says whether an engine serves a request of one token that names this number in the
// header X-data-parallel-rank.
func (t *tester) acceptsNumber(ctx context.Context, s *testedRank, number int) bool {
	target, named := *s.target, *s
	target.First, target.Rank = number, 0 // the header has the sum of the two
	named.target = &target
	_, err := t.send(ctx, named, &query{endpoint: mooncake.Completions}, lifecycle.Prefill, fmt.Sprintf("%s-n%d", t.id(), number),
		[][]byte{oneToken(s.models[0])})
	return err == nil
}

// oneToken returns the body of a completion request that asks for one token.
func oneToken(model string) []byte {
	// Marshalling a map of strings and a number cannot fail.
	body, _ := json.Marshal(map[string]any{"model": model, "prompt": "evenkeel self test", "max_tokens": 1})
	return body
}
