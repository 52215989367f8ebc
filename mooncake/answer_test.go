package mooncake

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const chatAnswer = `{"id":"chatcmpl-ek-1-p1","object":"chat.completion","choices":[{"index":0,"finish_reason":"length","message":{"role":"assistant","content":"The"},"token_ids":[671]}],
 "prompt_token_ids":[1,15,2047],"usage":{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4,"prompt_tokens_details":{"cached_tokens":2}},"kv_transfer_params":KV}`

func known(host string) bool { return host == "10.0.0.5" || host == "fd00::5" }

func TestReadProbeKeepsTheHandoffByteForByte(t *testing.T) {
	p := Profile{}.WithDefaults()
	raw := []byte(strings.Replace(chatAnswer, "KV", handoffJSON, 1))
	a, err := p.ReadProbe(raw, nil, known)
	require.NoError(t, err)
	require.Equal(t, ProbeAnswer{
		KV: json.RawMessage(handoffJSON), PromptTokens: 3, CachedTokens: 2,
		PromptTokenIDs: json.RawMessage("[1,15,2047]"), FinishReason: "length", EngineID: "e1",
	}, a)
	clear(raw)
	require.Equal(t, handoffJSON, string(a.KV), "it outlives the answer's buffer")
}

func TestReadProbeOfACompletion(t *testing.T) { // the prompt's token ids stand in the choice, usage has no details
	p := Profile{}.WithDefaults()
	a, err := p.ReadProbe([]byte(`{"id":"cmpl-1","choices":[{"finish_reason":"length","text":"x","prompt_token_ids":[7,8]}],
		"prompt_token_ids":null,"usage":{"prompt_tokens":2,"prompt_tokens_details":null},"kv_transfer_params":`+handoffJSON+`}`), nil, known)
	require.NoError(t, err)
	require.Equal(t, "[7,8]", string(a.PromptTokenIDs))
	require.Equal(t, 2, a.PromptTokens)
	require.Equal(t, -1, a.CachedTokens)
}

func TestReadProbeChecksTheShape(t *testing.T) {
	with := func(old, repl string) string {
		if !strings.Contains(handoffJSON, old) {
			panic(old)
		}
		return strings.Replace(handoffJSON, old, repl, 1)
	}
	const blocks, host, port, id = `[[412,413]]`, `"10.0.0.5"`, `30000`, `"remote_request_id":"chatcmpl-ek-1-p1-9a0b1c2d",`
	for _, tc := range []struct {
		name, connector, kv string
		want                error
		text                string
	}{
		{"nested block ids", AscendMooncakeV1, handoffJSON, nil, ""},
		{"flat block ids of old versions", AscendMooncakeV1, with(blocks, `[1,2]`), nil, ""},
		{"groups of which one is empty", AscendMooncakeV1, with(blocks, `[[],[3]]`), nil, ""},
		{"an unknown field passes", AscendMooncakeV1, with(`"odd"`, `"new_in_0.40":{"a":[null]},"odd"`), nil, ""},
		{"an IPv6 host", AscendMooncakeV1, with(host, `"fd00::5"`), nil, ""},
		{"Ascend before 0.14 names no request", AscendMooncakeV1, with(id, ""), nil, ""},
		{"NIXL works without a request id", NIXLPull, with(id, ""), nil, ""},
		{"anything that is not empty, if opaque", Opaque, `{"x":[]}`, nil, ""},

		{"null", AscendMooncakeV1, `null`, ErrNoHandoff, `missing or null, finish_reason is "length"; start the engine with kv_role`},
		{"empty", AscendMooncakeV1, `{}`, ErrNoHandoff, "kv_transfer_params is {}"},
		{"empty, if opaque", Opaque, `{}`, ErrNoHandoff, "kv_transfer_params is {}"},
		{"no blocks, taken by a preemption", AscendMooncakeV1, with(blocks, `[]`), ErrNoHandoff, "remote_block_ids is empty"},
		{"no blocks in any group", AscendMooncakeV1, with(blocks, `[[],[]]`), ErrNoHandoff, "remote_block_ids is empty"},

		{"a list", AscendMooncakeV1, `[1]`, ErrBadHandoff, "not an object: a list of 3 bytes"},
		{"a string, if opaque", Opaque, `"x"`, ErrBadHandoff, `not an object: a string of 1 bytes`},
		{"not to be pulled", AscendMooncakeV1, with(`"do_remote_prefill":true`, `"do_remote_prefill":1`), ErrBadHandoff, "do_remote_prefill is a number, not true"},
		{"the last of two counts", AscendMooncakeV1, with(`"odd"`, `"do_remote_prefill":false,"odd"`), ErrBadHandoff, "do_remote_prefill is false"},
		{"blocks missing", AscendMooncakeV1, with(`remote_block_ids`, `block_ids`), ErrBadHandoff, "remote_block_ids is missing"},
		{"blocks of text, as a simulator has them", AscendMooncakeV1, with(blocks, `["a"]`), ErrBadHandoff, `remote_block_ids is a list of 5 bytes, not`},
		{"blocks below zero", AscendMooncakeV1, with(blocks, `[[-1]]`), ErrBadHandoff, "remote_block_ids is a list of"},
		{"fractions of blocks", AscendMooncakeV1, with(blocks, `[1.5]`), ErrBadHandoff, "remote_block_ids is a list of"},
		{"blocks nested too deep", AscendMooncakeV1, with(blocks, `[[[1]]]`), ErrBadHandoff, "remote_block_ids is a list of"},
		{"blocks flat and nested", AscendMooncakeV1, with(blocks, `[1,[2]]`), ErrBadHandoff, "remote_block_ids is a list of"},
		{"no engine id", AscendMooncakeV1, with(`"e1"`, `""`), ErrBadHandoff, `remote_engine_id is a string of 0 bytes, not a name`},
		{"an engine id as number", NIXLPull, with(`"e1"`, `1`), ErrBadHandoff, "remote_engine_id is a number, not a name"},
		{"a name without end", NIXLPull, with(`"e1"`, `"`+strings.Repeat("e", 600)+`"`), ErrBadHandoff, "remote_engine_id is"},
		{"a request id that is none", AscendMooncakeV1, with(id, `"remote_request_id":null,`), ErrBadHandoff, "remote_request_id is null"},
		{"no port", AscendMooncakeV1, with(port, `0`), ErrBadHandoff, "remote_port is a number, not a port"},
		{"a port beyond ports", AscendMooncakeV1, with(port, `70000`), ErrBadHandoff, "remote_port is a number, not a port"},
		{"a host of nobody", AscendMooncakeV1, with(host, `"10.6.6.6"`), ErrUnknownHost, `"10.6.6.6" under remote_host; if it is one of yours, add it to kv_hosts`},
		{"a node of nobody", AscendMooncakeV1, with(`"odd"`, `"remote_multi_nodes_meta_mapping":{"0":{"host":"10.0.0.5"},"1":{"host":"10.6.6.6"}},"odd"`),
			ErrUnknownHost, `"10.6.6.6"`},
		{"addresses in a list", AscendMooncakeV1, with(`"odd"`, `"peerAddresses":["10.0.0.5","evil.example"],"odd"`), ErrUnknownHost, "a name of 12 bytes under"},
		{"hosts in a list", AscendMooncakeV1, with(`"odd"`, `"hosts":["10.0.0.5","evil.example"],"odd"`), ErrUnknownHost, "a name of 12 bytes under hosts"},
		{"nodes in a list", AscendMooncakeV1, with(`"odd"`, `"remote_multi_nodes_meta_mapping":[[{"host":"10.6.6.6"}]],"odd"`), ErrUnknownHost, `"10.6.6.6" under host`},
		{"a node below others", AscendMooncakeV1, with(`"odd"`, `"remote_multi_nodes_meta_mapping":{"0":{"1":{"host":["evil"]}}},"odd"`), ErrUnknownHost, "under host"},
		{"NIXL that pulls says so", NIXLPull, with(`"odd"`, `"transfer_mode":"pull","odd"`), nil, ""},
		{"NIXL that pushes says so", NIXLPush, with(`"odd"`, `"transfer_mode":"push","odd"`), nil, ""},
		{"a push, where a pull is expected", NIXLPull, with(`"odd"`, `"transfer_mode":"push","odd"`), ErrBadHandoff, "the engine runs NixlPushConnector; set connector: nixl-push in the profile of both engines"},
		{"a pull, where a push is expected", NIXLPush, with(`"odd"`, `"transfer_mode":"pull","odd"`), ErrBadHandoff, "the engine runs NixlConnector; set connector: nixl-pull"},
		{"a bootstrap server", NIXLPull, with(`"odd"`, `"remote_bootstrap_addr":"http://evil:8998","odd"`), ErrUnknownHost, "under remote_bootstrap_addr"},
		{"an ip", NIXLPull, with(`"odd"`, `"meta":{"nodeIp":"evil"},"odd"`), ErrUnknownHost, "a name of 4 bytes under a key that we do not know"},
		{"a host twice, the known one last", AscendMooncakeV1, with(`"remote_host"`, `"remote_host":"10.6.6.6","remote_host"`), ErrUnknownHost, "10.6.6.6"},
		{"a key that is written in escapes", AscendMooncakeV1, with(`"odd"`, `"\u0068ost":"evil","odd"`), ErrUnknownHost, "under host"},
		{"an IP address where nobody looks for one", AscendMooncakeV1, with(`"odd"`, `"new":{"x":["a","10.6.6.6:30000"]},"odd"`), ErrUnknownHost, `"10.6.6.6"`},
		{"one of version 6", AscendMooncakeV1, with(`"odd"`, `"new":"[fd00::6]:1","odd"`), ErrUnknownHost, `"fd00::6"`},
		{"one in a list of text", AscendMooncakeV1, with(`"odd"`, `"new":"10.0.0.5,10.6.6.6","odd"`), ErrUnknownHost, `"10.6.6.6"`},
		{"one as a key", AscendMooncakeV1, with(`"odd"`, `"new":{"10.6.6.6":1},"odd"`), ErrUnknownHost, `"10.6.6.6"`},
		{"a URL where nobody looks for one", AscendMooncakeV1, with(`"odd"`, `"new":"tcp://evil:5","odd"`), ErrUnknownHost, "a name of 4 bytes"},
		{"known hosts, however they are written", AscendMooncakeV1,
			with(`"odd"`, `"hosts":{"0":"10.0.0.5:30000","1":["http://10.0.0.5:1/x","[fd00::5]:2","fd00::5"]},"new":"tcp://10.0.0.5","base_addr":[140737488355328],"odd"`), nil, ""},
		{"names that are no addresses", AscendMooncakeV1, with(`"odd"`, `"model":"a.b","shipping":"x:y","ghosting":"z","id":"12345","odd"`), nil, ""},
		{"what the profile says is none", AscendMooncakeV1, with(`"odd"`, `"serial":"1.2.3.4","odd"`), nil, ""},
		{"a handoff without end", Opaque, `{"x":"` + strings.Repeat("x", maxHandoff) + `"}`, ErrBadHandoff, "more than 1048576"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := Profile{Connector: tc.connector, KVPlainKeys: []string{"serial"}}.WithDefaults()
			a, err := p.ReadProbe([]byte(strings.Replace(chatAnswer, "KV", tc.kv, 1)), nil, known)
			require.ErrorIs(t, err, tc.want)
			require.Equal(t, "length", a.FinishReason, "the rest of the answer is read")
			require.Equal(t, 3, a.PromptTokens)
			if tc.want != nil {
				require.ErrorContains(t, err, tc.text)
				require.Nil(t, a.KV)
			} else {
				require.Equal(t, tc.kv, string(a.KV))
				require.Equal(t, tc.connector == NIXLPush || tc.connector != Opaque && !strings.Contains(tc.kv, "remote_request_id"), a.ReusesRequestID)
			}
		})
	}
}

func TestReadProbeOfAnAnswerThatIsNone(t *testing.T) {
	p := Profile{}.WithDefaults()
	for _, tc := range []struct {
		name, answer string
		want         error
	}{
		{"no params at all: the engine does not hand off", `{"choices":[{"finish_reason":"stop"}]}`, ErrNoHandoff},
		{"an error with status 200", `{"error":{"message":"boom","code":500}}`, ErrBadHandoff},
		{"an HTML page", `<html>`, ErrBadHandoff},
		{"nothing", ``, ErrBadHandoff},
		{"cut short", `{"kv_transfer_params":{"do_remote`, ErrBadHandoff},
		{"too large", `{"x":"` + strings.Repeat("x", MaxProbeAnswer) + `"}`, ErrBadHandoff},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := p.ReadProbe([]byte(tc.answer), nil, known)
			require.ErrorIs(t, err, tc.want)
		})
	}
	_, err := p.ReadProbe([]byte(strings.Replace(chatAnswer, "KV", handoffJSON, 1)), nil, nil)
	require.ErrorIs(t, err, ErrUnknownHost, "without a list no host is known")
}

func TestUpstreamMooncakeMakesItsOwnHandoff(t *testing.T) { // its engine returns none
	p := Profile{Connector: VLLMMooncake}.WithDefaults()
	info := &BootstrapInfo{TransferID: "xfer-1", BootstrapAddr: "http://10.0.0.5:8998", EngineID: `e"1`}
	answer := []byte(`{"id":"a","choices":[{"finish_reason":"length"}],"usage":{"prompt_tokens":3},"kv_transfer_params":null}`)
	a, err := p.ReadProbe(answer, info, nil)
	require.NoError(t, err)
	require.Equal(t, 3, a.PromptTokens)
	require.JSONEq(t, `{"do_remote_prefill":true,"do_remote_decode":false,"transfer_id":"xfer-1",
		"remote_bootstrap_addr":"http://10.0.0.5:8998","remote_engine_id":"e\"1"}`, string(a.KV))

	_, err = p.ReadProbe([]byte(`{"choices":[{"finish_reason":"stop"}]}`), info, nil)
	require.ErrorIs(t, err, ErrNoHandoff, "blocks of a request that was stopped are freed at once")
	for _, incomplete := range []*BootstrapInfo{nil, {TransferID: "x"}, {TransferID: "x", BootstrapAddr: "b"}} {
		_, err = p.ReadProbe(answer, incomplete, nil)
		require.ErrorIs(t, err, ErrBadHandoff)
	}
}

func FuzzReadProbe(f *testing.F) {
	for _, kv := range []string{handoffJSON, "null", "{}", `{"do_remote_prefill":true,"remote_block_ids":[[],"x"]}`, `[`} {
		f.Add([]byte(strings.Replace(chatAnswer, "KV", kv, 1)))
	}
	f.Add([]byte(`{"choices":[1],"usage":[],"prompt_token_ids":{},"id":1,"kv_transfer_params":{"remote_host":{}}}`))
	p := Profile{}.WithDefaults()
	f.Fuzz(func(t *testing.T, raw []byte) {
		a, err := p.ReadProbe(raw, nil, known)
		if err != nil {
			require.Nil(t, a.KV)
			return
		}
		b := scan(t, string(raw))
		kv, _ := b.Get("kv_transfer_params")
		require.Equal(t, string(kv), string(a.KV))
	})
}

func TestReadProbeReadsTheLastOfARepeatedKey(t *testing.T) { // as Python's json does, and so the decode engine
	p := Profile{}.WithDefaults()
	repeated := strings.TrimSuffix(handoffJSON, "}") + `,"remote_host":"10.6.6.6"}`
	_, err := p.ReadProbe([]byte(strings.Replace(chatAnswer, "KV", repeated, 1)), nil, known)
	require.ErrorIs(t, err, ErrUnknownHost)
	_, err = p.ReadProbe([]byte(strings.Replace(chatAnswer, "KV", handoffJSON+`,"kv_transfer_params":null`, 1)), nil, known)
	require.ErrorIs(t, err, ErrNoHandoff)
}

func TestReadProbeBoundsTheMembers(t *testing.T) {
	p := Profile{}.WithDefaults()
	many := strings.Repeat(`,"k":0`, maxMembers)
	_, err := p.ReadProbe([]byte(strings.Replace(chatAnswer, "KV", strings.TrimSuffix(handoffJSON, "}")+many+"}", 1)), nil, known)
	require.ErrorIs(t, err, ErrBadHandoff)
	_, err = p.ReadProbe([]byte(strings.Replace(chatAnswer, "KV", handoffJSON+many, 1)), nil, known)
	require.ErrorIs(t, err, ErrBadHandoff)
}
