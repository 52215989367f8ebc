package config

import (
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/prefill"
	"evenkeel/prefill/policy"
)

func TestValidateRefuses(t *testing.T) {
	const engines = "engines:\n  prefill: [{url: \"http://p:1\"}]\n  decode: [{url: \"http://d:1\"}]\n"
	for _, tc := range []struct{ name, text, path, says string }{
		{"an address without a port", "listen: localhost", "listen", "write host:port"},
		{"an address with an empty port", "listen: \"localhost:\"", "listen", "write host:port"},
		{"an admin listener for all without a token", "admin: {listen: \":9090\"}", "admin.listen", "set admin.token_file, or listen on 127.0.0.1"},
		{"one address for clients and operators", "listen: 127.0.0.1:9090", "admin.listen", "different addresses"},
		{"an unknown decode policy", "dispatch: {policy: fastest}", "dispatch.policy", "there are br0,"},
		{"a decode policy with a setting it has not", "dispatch: {policy: \"jsq,theta=1\"}", "dispatch.policy", "theta"},
		{"a prefill policy nobody knows", "prefill: {policy: fnish}", "prefill.policy", "there are round-robin"},
		{"a prefill policy that is only compared with", "prefill: {policy: sticky-ring}", "prefill.policy", "affinity.enabled: true"},
		{"a policy whose expression has a typo", "prefill:\n  policies:\n    mine:\n      score: \"foo + 1\"", "prefill.policies.mine.score", "unknown name foo (1:1)"},
		{"a policy without a score", "prefill: {policies: {mine: {objective: max}}}", "prefill.policies.mine.score", "it has none"},
		{"a policy with a tie-break nobody knows", "prefill: {policies: {mine: {score: bs, tie_break: [bs, hits]}}}", "prefill.policies.mine.tie_break[1]", "no indicator"},
		{"a weight nobody knows", "prefill: {work: bytes}", "prefill.work", "write tokens or vllm-ascend"},
		{"a weight for a policy that has none", "prefill: {policy: round-robin, work: vllm-ascend}", "prefill.work", "remove it"},
		{"a threshold of nothing", "prefill: {kv_threshold: 0}", "prefill.kv_threshold", "such as 0.9"},
		{"a threshold its hysteresis eats", "prefill: {kv_threshold: 0.01}", "prefill.kv_threshold", "such as 0.9"},
		{"an origin with a path", "cors: {origins: [\"https://chat.example/\"]}", "cors.origins[0]", "nothing behind it"},
		{"an origin without a scheme", "cors: {origins: [\"*.example\"]}", "cors.origins[0]", "https://chat.example"},
		{"an origin with a star in it", "cors: {origins: [\"https://*.example\"]}", "cors.origins[0]", "https://chat.example"},
		{"an origin in capitals", "cors: {origins: [\"https://a.example\", \"https://Chat.example\"]}", "cors.origins[1]", "in lower case"},
		{"an origin with the usual port", "cors: {origins: [\"https://chat.example:443\"]}", "cors.origins[0]", "not the usual one"},
		{"all origins and one more", "cors: {origins: [\"https://chat.example\", \"*\"]}", "cors.origins[1]", "write it alone"},
		{"no answers", "limits: {answers: 0}", "limits.answers", "at least 1"},
		{"no answer to a prompt", "limits: {answers_per_prompt: 0}", "limits.answers_per_prompt", "at least 1"},
		{"no stop string", "limits: {stop_strings: 0}", "limits.stop_strings", "at least 1"},
		{"nothing passed through", "limits: {passed_through: 0}", "limits.passed_through", "at least 1"},
		{"no attempt", "prefill: {retry: {attempts: 0}}", "prefill.retry.attempts", "at least 1"},
		{"no backoff", "prefill: {retry: {base: 0s}}", "prefill.retry.base", "above 0"},
		{"a negative scrape interval", "prefill: {scrape: {interval: -1s}}", "prefill.scrape.interval", "0s or more"},
		{"no time for a scrape", "prefill: {scrape: {timeout: 0s}}", "prefill.scrape.timeout", "above 0"},
		{"no time in the arrival queue", "prefill: {queue: {timeout: 0s}}", "prefill.queue.timeout", "above 0"},
		{"no room in the arrival queue", "prefill: {queue: {max: 0}}", "prefill.queue.max", "at least 1"},
		{"no pool", "pool: {size: 0}", "pool.size", "at least 1"},
		{"a negative TTL", "pool: {ttl: -1s}", "pool.ttl", "0s for the hold budget"},
		{"a TTL above the hold budget", "pool: {ttl: 361s}\n" + engines, "pool.ttl", "lower pool.ttl to 6m0s"},
		{"a hold of what is not held", "profiles: {a: {connector: ascend-layerwise, kv_hold_timeout: 1m}}", "profiles.a.kv_hold_timeout", "keeps nothing for us; remove it"},
		{"a wildcard that decode engines are to call", "bind: {listen: \":8010\"}", "bind.listen", "no host that decode engines can call; set bind.advertise"},
		{"a wildcard told to decode engines", "bind: {listen: \":8010\", advertise: \"http://0.0.0.0:8010\"}", "bind.advertise", "no host that decode engines can call"},
		{"a loopback told to decode engines elsewhere", "bind: {listen: \"127.0.0.1:8010\"}\nprofiles: {lw: {connector: ascend-layerwise}}\nengines: {decode: [{url: \"http://127.0.0.1:1\", profile: lw}, {url: \"http://d1:1\", profile: lw}]}", "bind.listen", "is the decode engine itself for d1"},
		{"nowhere to call back", "profiles: {lw: {connector: ascend-layerwise}}\nengines: {decode: [{url: \"http://d1:1\", profile: lw}]}", "profiles.lw.connector", "set bind.listen"},
		{"a name for nobody who listens", "bind: {advertise: \"http://a:1\"}", "bind.advertise", "does not listen for callbacks"},
		{"a callback address that is none", "bind: {listen: \"8010\"}", "bind.listen", "is not an address"},
		{"a callback address of clients", "listen: \"10.0.0.2:8000\"\nbind: {listen: \"10.0.0.2:8000\"}", "bind.listen", "an address of their own"},
		{"a callback URL with a path", "bind: {listen: \":1\", advertise: \"http://a:1/x\"}", "bind.advertise", "a host and a port alone"},
		{"callers by name", "bind: {allow: [d0]}", "bind.allow[0]", "neither an address nor a range"},
		{"no time for a callback", "bind: {callback_timeout: 0s}", "bind.callback_timeout", "above 0"},
		{"slots ahead in words", "bind: {ahead: some}", "bind.ahead", "write 0 or more, or auto"},
		{"a queue for prefill engines where none waits", "profiles: {s: {connector: sglang}}\nengines: {prefill: [{url: \"http://p:1\", profile: s}]}\nprefill: {queue: {max: 5}}", "prefill.queue.max", "pool.size is their limit; remove it"},
		{"a decode engine without a partner", "profiles: {s: {connector: sglang}}\nengines: {prefill: [{url: \"http://p:1\", profile: s}], decode: [{url: \"http://d:1\", profile: s}, {url: \"http://d:2\"}]}", "engines.decode[1].profile", "its connector is ascend-mooncake-v1 (profile ascend), and no prefill engine has the same: http://p:1 has sglang (profile s)"},
		{"a prefill engine without a partner", "profiles: {n: {connector: sglang}, l: {connector: nixl-push}}\nengines: {prefill: [{url: \"http://p:1\", profile: n}, {url: \"http://p:2\", profile: l}], decode: [{url: \"http://d:1\", profile: l}]}", "engines.prefill[0].profile", "no decode engine has the same"},
		{"an unknown connector", "profiles: {a: {connector: tcp}}", "profiles.a.connector", "use one of"},
		{"a profile without hold time", "profiles: {a: {kv_hold_timeout: -1s}}", "profiles.a.kv_hold_timeout", "kv_hold_timeout"},
		{"a profile with a name of its own", "profiles: {a: {name: b}}", "profiles.a.name", "no such key"},
		{"an engine without a URL", "engines: {prefill: [{profile: ascend}]}", "engines.prefill[0].url", "write http://host:port"},
		{"an engine without a scheme", "engines: {decode: [{url: \"d0:8200\"}]}", "engines.decode[0].url", "write http://host:port"},
		{"an engine with a path", "engines: {decode: [{url: \"http://d0:8200/v1\"}]}", "engines.decode[0].url", "http://host:port alone"},
		{"an engine with a key in its URL", "engines: {decode: [{url: \"http://u:p@d0:8200\"}]}", "engines.decode[0].url", "api_key_env"},
		{"an engine on no port", "engines: {decode: [{url: \"http://d0:0\"}]}", "engines.decode[0].url", "1 to 65535"},
		{"a duplicate decode engine", "engines: {decode: [{url: \"http://d0:80\"}, {url: \"http://d0\"}]}", "engines.decode[1].url", "first as engines.decode[0]"},
		{"an unknown profile", "engines: {decode: [{url: \"http://d0:1\", profile: a}]}", "engines.decode[0].profile", "there are aggregated, ascend"},
		{"a group of two barriers", "engines: {decode: [{url: \"http://d0:1\"}, {url: \"http://d1:1\", barrier: none}]}", "engines.decode[1].barrier", "group \"main\" has barrier none here and dp at http://d0:1"},
		{"a barrier nobody knows", "engines: {decode: [{url: \"http://d0:1\", barrier: ep}]}", "engines.decode[0].barrier", "dp"},
		{"negative slots", "engines: {decode: [{url: \"http://d0:1\", slots: -1}]}", "engines.decode[0].slots", "--max-num-seqs"},
		{"negative KV", "engines: {decode: [{url: \"http://d0:1\", kv_tokens: -1}]}", "engines.decode[0].kv_tokens", "0 to ask the engine"},
		{"a negative cost", "engines: {decode: [{url: \"http://d0:1\", cost: -1}]}", "engines.decode[0].cost", "1 is that of a usual rank"},
		{"advice all the time", "advice: {interval: 1ns}", "advice.interval", "write 10ms or more, or 0s for no advice"},
		{"an endless cost", "engines: {decode: [{url: \"http://d0:1\", cost: 1.0e+39}]}", "engines.decode[0].cost", "+Inf is not a cost"},
		{"a cost that no rank has", "engines: {decode: [{url: \"http://d0:1\", cost: 1001}]}", "engines.decode[0].cost", "1 is that of a usual rank"},
		{"too many ranks", "engines: {decode: [{url: \"http://d0:1\", ranks: 5000}]}", "engines.decode[0].ranks", "1 to 4096"},
		{"ranks that begin below 0", "engines: {decode: [{url: \"http://d0:1\", ranks: 2, first_rank: -1}]}", "engines.decode[0].first_rank", "-1 is no number of a DP rank"},
		{"ranks that begin above 0 where all are behind one address", "profiles: {a: {dp_mode: internal}}\nengines: {prefill: [{url: \"http://p0:1\", profile: a, ranks: 2, first_rank: 2}]}", "engines.prefill[0].first_rank", "only the nodes of a hybrid deployment"},
		{"several ranks behind an address that is not told how many", "profiles: {a: {dp_mode: internal}}\nengines: {decode: [{url: \"http://d0:1\", profile: a}]}", "engines.decode[0]", "set ranks"},
		{"slots of a prefill engine", "engines: {prefill: [{url: \"http://p0:1\", slots: 4}]}", "engines.prefill[0].slots", "only decode and aggregated engines"},
		{"a decode engine that hands nothing over", "engines: {decode: [{url: \"http://d0:1\", profile: aggregated}]}", "engines.decode[0].profile", "list it under engines.aggregated"},
		{"a prefill engine that hands nothing over", "profiles: {n: {connector: none}}\nengines: {prefill: [{url: \"http://p0:1\", profile: n}]}", "engines.prefill[0].profile", "list it under engines.aggregated"},
		{"a hold where nothing is handed over", "profiles: {aggregated: {connector: none, kv_hold_timeout: 480s}}", "profiles.aggregated.kv_hold_timeout", "has no meaning with connector none"},
		{"a negative token budget", "engines: {aggregated: [{url: \"http://a0:1\", token_budget: -1}]}", "engines.aggregated[0].token_budget", "--max-num-batched-tokens"},
		{"prompts in every step but one", "engines: {aggregated: [{url: \"http://a0:1\", prefill_schedule_interval: -2}]}", "engines.aggregated[0].prefill_schedule_interval", "--prefill-schedule-interval"},
		{"the token budget of a decode engine", "engines: {decode: [{url: \"http://d0:1\", token_budget: 2048}]}", "engines.decode[0].token_budget", "only aggregated engines"},
		{"the interval of a prefill engine", "engines: {prefill: [{url: \"http://p0:1\", prefill_schedule_interval: 2}]}", "engines.prefill[0].prefill_schedule_interval", "only aggregated engines"},
		{"KV events of a decode engine", "engines: {decode: [{url: \"http://a0:1\", kv_events_port: 5557}]}", "engines.decode[0].kv_events_port", "only the events of engines that prefill"},
		{"a group that steers a terminal", `engines: {decode: [{url: "http://d0:1", group: "a\e[2J"}]}`, "engines.decode[0].group", `"a\x1b[2J" is no name of a group`},
		{"an aggregated group of two barriers", "engines: {aggregated: [{url: \"http://a0:1\"}, {url: \"http://a1:1\", barrier: none}]}", "engines.aggregated[1].barrier", "group \"main\" has barrier none here"},
		{"a kind of engines that is preferred and does not exist", "engines: {prefer: both}", "engines.prefer", "write pd or aggregated"},
		{"no body at all", "limits: {body_bytes: 0}", "limits.body_bytes", "at least 1"},
		{"a media host that is a URL", "limits: {media_hosts: [\"https://x\"]}", "limits.media_hosts[0]", "a name alone"},
		{"a level nobody knows", "log: {level: trace}", "log.level", "debug, info, warn or error"},
		{"a step that takes less than no time", "dispatch: {step_model: {c0_ms: -12}}", "dispatch.step_model.c0_ms", "0 to have it learned"},
		{"a request that takes less than no time", "dispatch: {step_model: {request_ms: -1}}", "dispatch.step_model.request_ms", "0 to have it learned"},
		{"a request whose weight nobody knows", "dispatch: {step_model: {request_ms: 0.1}}", "dispatch.step_model.request_ms", "write c1_ms"},
		{"a decision log too small for a round", "dispatch: {log: {file: d.jsonl, max_bytes: 1000}}", "dispatch.log.max_bytes", "at least 1048576"},
		{"a choice among policies", "dispatch: {policy: \"auto:br0,evenkeel\"}", "dispatch.policy", "unknown policy \"auto\"; there are br0, "},
		{"an oracle as policy", "dispatch: {policy: \"brh:predictor=oracle\"}", "dispatch.policy", "only a replay can"},
		{"an oracle as predictor", "predictor: {kind: oracle}", "predictor.kind", "only a replay can"},
		{"a predictor nobody knows", "predictor: {kind: guess}", "predictor.kind", "none, survival or exact"},
		{"prompts told apart without a secret", "predictor: {kind: exact}", "predictor.kind", "set predictor.secret_file"},
		{"a file nobody reads", "predictor: {kind: none, file: fit.json}", "predictor.file", "or remove the file"},
		{"no time for a decision", "dispatch: {tick_limit: 0s}", "dispatch.tick_limit", "above 0"},
		{"a prompt on a decode rank of several steps", "profiles: {ascend: {allow_local_prefill: true, max_num_batched_tokens: 256}}\nengines: {decode: [{url: \"http://d:1\"}]}", "profiles.ascend.allow_local_prefill", "compute 256 tokens per step"},
		{"no decode rank may compute a prompt", "prefill: {disaggregation: {mode: conditional}}\nengines: {decode: [{url: \"http://d:1\"}]}", "prefill.disaggregation.mode", "no decode engine has a profile with allow_local_prefill"},
		{"a mode of disaggregation that is none", "prefill: {disaggregation: {mode: auto}}", "prefill.disaggregation.mode", "write always, or conditional"},
		{"a threshold in words", "prefill: {disaggregation: {threshold_tokens: few}}", "prefill.disaggregation.threshold_tokens", "1 or more, or auto"},
		{"a bound below one prompt", "prefill: {disaggregation: {threshold_tokens: 600}}", "prefill.disaggregation.max_local_tokens_per_rank", "less than one prompt"},
		{"owners of a single region", "geo: {mode: off, ownership: {engine: static}}", "geo.ownership.engine", "no other regions while geo.mode is off"},
		{"a lease that nobody keeps", "geo: {mode: distributed, self: {id: us-1, region: us}, hmac: {keys_file: k}, ownership: {engine: consul}}", "geo.ownership.engine", "kubernetes, etcd or static"},
		{"a lease in an etcd that is nowhere", "geo: {mode: distributed, self: {id: us-1, region: us}, hmac: {keys_file: k}, ownership: {engine: etcd}}", "geo.ownership.etcd.endpoints", "etcd-0:2379"},
		{"leases in other clusters in a namespace that each proxy finds for itself", "geo: {mode: distributed, self: {id: us-1, region: us}, hmac: {keys_file: k}, ownership: {engine: kubernetes, kubernetes: {kubeconfig: {eu: f}}}}", "geo.ownership.kubernetes.namespace", "every proxy of these regions"},
		{"a lease too short to renew", "geo: {ownership: {lease: 1500ms}}", "geo.ownership.lease", "3s or more"},
		{"more than all slots", "geo: {ownership: {max_share: 1.5}}", "geo.ownership.max_share", "such as 0.5"},
		{"an engine of a region without owners", "engines: {prefill: [{url: \"http://e:1\", region: eu}]}", "engines.prefill", "need geo.ownership.engine"},
		{"regions without a name", "geo: {mode: distributed, self: {region: us}, hmac: {keys_file: k}}", "geo.self.id", "cannot name a proxy"},
		{"regions that anybody could call", "geo: {mode: distributed, self: {id: us-1, region: us}}", "geo.tls", "anyone could send requests here"},
		{"a peer in clear text", "geo: {mode: distributed, self: {id: us-1, region: us}, tls: {cert: c, key: k, ca: a}, peers: [{id: eu-1, region: eu, url: 'http://eu:9443', san: eu}]}", "geo.peers[0].url", "clear text and nothing is signed"},
		{"a peer that could have any certificate", "geo: {mode: distributed, self: {id: us-1, region: us}, tls: {cert: c, key: k, ca: a}, peers: [{id: eu-1, region: eu, url: 'https://eu:9443'}]}", "geo.peers[0].san", "spiffe://ek/eu-1"},
		{"two of one name", "geo: {mode: distributed, self: {id: us-1, region: us}, hmac: {keys_file: k}, peers: [{id: us-1, region: eu, url: 'http://eu:9443'}]}", "geo.peers[0].id", "each needs its own"},
		{"a centre that nobody knows", "geo: {mode: central, central: eu-1, self: {id: us-1, region: us}, hmac: {keys_file: k}}", "geo.central", "neither geo.self.id nor one of geo.peers"},
		{"a policy of another tier", "geo: {policy: lmetric}", "geo.policy", "there are finish"},
		{"no way to push", "geo: {push: {mode: sp-x}}", "geo.push.mode", "write sp-e, sp-p, sp-o or blind"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := Parse("f.yaml", []byte(tc.text))
			found := errorsOf(err)
			require.Len(t, found, 1, "%v", err)
			e := found[0]
			require.Equal(t, tc.path, e.Path)
			require.Contains(t, e.Msg, tc.says)
			require.Equal(t, "f.yaml", e.File)
			if !strings.HasPrefix(tc.text, "listen: 127") { // that one is told at a default
				require.Positive(t, e.Line, e)
				require.Positive(t, e.Column, e)
				require.Contains(t, e.Excerpt, ">    ", e)
			}
		})
	}
}

func TestValidateAccepts(t *testing.T) {
	for _, tc := range []struct{ name, text string }{
		{"what a later version has, turned off", "geo: {mode: off}"},
		{"nothing predicted", "predictor: {kind: none, file: \"\"}"},
		{"a step model as fit step prints it", "dispatch: {step_model: {c0_ms: 55, c1_ms: 0.0002}}"},
		{"the whole law of a step", "dispatch: {step_model: {c0_ms: 55, c1_ms: 0.0002, request_ms: 0.4, own_prefill_ms: 0.07, shared_prefill_ms: 0.03, prefill_step_ms: 5}}"},
		{"one engine on both sides", "engines: {prefill: [{url: \"http://e:1\"}], decode: [{url: \"http://e:1\"}]}"},
		{"one list for both sides", "engines: {prefill: &all [{url: \"http://e:1\"}], decode: *all}"},
		{"an admin listener for all with a token", "admin: {listen: \":9090\", token_file: /run/token}"},
		{"IPv6", "listen: \"[::]:8000\"\nadmin: {listen: \"[::1]:9090\"}\nengines: {decode: [{url: \"http://[fd00::1]:8200\"}]}"},
		{"a TTL that is the hold budget", "pool: {ttl: 360s}\nengines: {prefill: [{url: \"http://p:1\"}]}"},
		{"a TTL above the budget of a profile nobody uses", "pool: {ttl: 60s}\nprofiles: {n: {connector: nixl-pull}}\nengines: {prefill: [{url: \"http://p:1\"}]}"},
		{"two groups, each with its barrier", "engines: {decode: [{url: \"http://d0:1\"}, {url: \"http://d1:1\", group: dense, barrier: none}]}"},
		{"callbacks", "bind: {listen: \":8010\", advertise: \"http://10.0.0.2:8010\", allow: [10.0.1.5, 10.0.2.0/24], ahead: auto}\nprofiles: {lw: {connector: ascend-layerwise}}\nengines: {prefill: [{url: \"http://p\", profile: lw}], decode: [{url: \"http://d1:1\", profile: lw}]}"},
		{"callbacks on one machine", "bind: {listen: \"127.0.0.1:8010\"}\nprofiles: {lw: {connector: ascend-layerwise}}\nengines: {decode: [{url: \"http://localhost:1\", profile: lw}]}"},
		{"an early connector that nobody uses", "profiles: {lw: {connector: ascend-layerwise}}\nprefill: {queue: {max: 5}}"},
		{"a queue for those that wait for a prefill engine", "profiles: {s: {connector: sglang}}\nengines: {prefill: [{url: \"http://p:1\", profile: s}, {url: \"http://p:2\"}]}\nprefill: {queue: {max: 5}}"},
		{"no scrapes", "prefill: {scrape: {interval: 0s}}"},
		{"a policy with settings", "dispatch: {policy: \"br0,theta=64\"}"},
		{"a number where a text may be one", "profiles: {a: {probe_min_tokens: 1}}"},
		{"the weight of vllm-ascend", "prefill: {policy: least-tokens, work: vllm-ascend}"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := Parse("f.yaml", []byte(tc.text))
			require.NoError(t, err)
		})
	}
}

func TestAFlagIsNamedInPlaceOfTheFile(t *testing.T) {
	c, err := Parse("f.yaml", []byte("dispatch: {policy: br0}\n"))
	require.NoError(t, err)
	c.Dispatch.Policy = "fastest"
	c.Flag("dispatch.policy", "--policy")
	err = c.Validate()
	require.ErrorContains(t, err, "--policy: dispatch.policy: unknown policy \"fastest\"")
	require.NotContains(t, err.Error(), "f.yaml")

	c = Default()
	c.Engines.Decode = []Engine{{URL: "http://d0:1"}, {URL: "http://d0:1"}}
	c.Flag("engines.decode", "--decoder-hosts")
	require.EqualError(t, c.Validate(), "--decoder-hosts: engines.decode[1].url: d0:1 is listed twice, first as engines.decode[0]; remove "+
		"one, or set ranks if it fronts several DP ranks")
}

// TestWhatIsValidHereIsValidThere: the prefill tier refuses nothing at its start
// that this package let pass, and no value means another default there.
func TestWhatIsValidHereIsValidThere(t *testing.T) {
	whole := Default()
	require.NoError(t, whole.Validate())
	c, d := whole.Prefill, prefill.Default()
	require.Equal(t, d.Policy, c.Policy)
	require.Equal(t, d.KVThreshold, c.KVThreshold)
	require.Equal(t, d.Scrape, c.Scrape)
	require.Equal(t, d.Queue, c.Queue)
	require.Equal(t, d.Retry, c.Retry)

	share := rapid.OneOf(rapid.Float64Range(-1, 2), rapid.SampledFrom([]float64{0, 0.02, 1}))
	rapid.Check(t, func(t *rapid.T) {
		c := Default()
		c.Prefill.Policy = rapid.SampledFrom(append(policy.Names(), "", "fnish")).Draw(t, "policy")
		c.Prefill.KVThreshold = share.Draw(t, "threshold")
		c.Prefill.Retry.Budget = share.Draw(t, "budget")
		c.Prefill.Retry.Attempts = rapid.IntRange(-1, 3).Draw(t, "attempts")
		c.Prefill.Queue.Max = rapid.IntRange(-1, 3).Draw(t, "queue")
		if c.Validate() != nil {
			return
		}
		p := c.Prefill
		require.NoError(t, prefill.Config{
			Policy: p.Policy, KVThreshold: p.KVThreshold, Queue: p.Queue, Retry: p.Retry,
		}.Validate())
		require.NotZero(t, p.KVThreshold*p.Retry.Budget*float64(p.Retry.Attempts*p.Queue.Max), "0 would be another default")
	})
}

// An engine whose connector the other side lacks hands nothing over, and one whose connector says
// nothing is not judged.
func TestAConnectorOfOneSideIsDoubtful(t *testing.T) {
	for name, row := range map[string]struct{ prefill, decode, doubtful string }{
		"both have it":        {"{url: p, profile: nixl}", "{url: d, profile: nixl}", ""},
		"one forgot it":       {"{url: p, profile: nixl}", "{url: d, profile: nixl}, {url: e}", "engines.decode[1].profile"},
		"the other side did":  {"{url: p}, {url: q, profile: nixl}", "{url: d, profile: nixl}", "engines.prefill[0].profile"},
		"one hands all on":    {"{url: p, profile: any}", "{url: d, profile: nixl}", ""},
		"nobody says another": {"{url: p}", "{url: d}", ""},
	} {
		engines := regexp.MustCompile(`url: (\w)`).ReplaceAllString("prefill: ["+row.prefill+"], decode: ["+row.decode+"]", `url: "http://$1:1"`)
		c, err := Parse("f.yaml", []byte("profiles: {nixl: {connector: nixl-pull}, any: {connector: opaque}}\nengines: {"+engines+"}\n"))
		require.NoError(t, err)
		require.NoError(t, c.Validate(), name)
		paths := ""
		for _, d := range c.Doubts() {
			if strings.HasPrefix(d.Path, "engines.") {
				paths += d.Path
			}
		}
		require.Equal(t, row.doubtful, paths, name)
	}
}

// Engines on several hosts that were left in one group wait for each other. Two on one host may be
// ranks of one deployment.
func TestEnginesOfSeveralHostsInOneUnwrittenGroupAreDoubtful(t *testing.T) {
	for name, row := range map[string]struct{ engines, doubtful string }{
		"two hosts":                  {`{url: "http://a:1"}, {url: "http://b:1"}`, "engines.aggregated[1]"},
		"three hosts are told once":  {`{url: "http://a:1"}, {url: "http://b:1"}, {url: "http://c:1"}`, "engines.aggregated[1]"},
		"one host":                   {`{url: "http://a:1"}, {url: "http://a:2"}`, ""},
		"a group is written":         {`{url: "http://a:1", group: main}, {url: "http://b:1", group: main}`, ""},
		"each is a group of its own": {`{url: "http://a:1", ranks: 2}, {url: "http://b:1", ranks: 2}`, ""},
		"they do not step together":  {`{url: "http://a:1", barrier: none}, {url: "http://b:1", barrier: none}`, ""},
	} {
		c, err := Parse("f.yaml", []byte("engines: {aggregated: ["+row.engines+"]}\n"))
		require.NoError(t, err)
		require.NoError(t, c.Validate(), name)
		paths := ""
		for _, d := range c.Doubts() {
			paths += d.Path
		}
		require.Equal(t, row.doubtful, paths, name)
	}
}

func TestEverySiteWithoutAKeyIsDoubtful(t *testing.T) {
	const engines = "engines: {aggregated: [{url: \"http://a:1\"}]}\n"
	for text, doubtful := range map[string]bool{
		"cors: {origins: [\"*\"]}": true, "cors: {origins: [\"https://chat.example\"]}": false,
		"cors: {origins: [\"*\"]}\nkeys_file: keys.yaml": false,
	} {
		c, err := Parse("f.yaml", []byte(engines+text))
		require.NoError(t, err)
		require.NoError(t, c.Validate())
		doubts := c.Doubts()
		require.Equal(t, doubtful, len(doubts) == 1, "%s: %v", text, doubts)
		if doubtful {
			require.Equal(t, "cors.origins", doubts[0].Path)
		}
	}
}
