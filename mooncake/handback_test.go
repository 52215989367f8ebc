package mooncake

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// As a stream of vLLM 0.33.0 says it.
const keptBy = `{"do_remote_prefill":false,"do_remote_decode":true,"remote_block_ids":[[1,2,3]],"remote_engine_id":"e","remote_request_id":"cmpl-x","remote_host":"10.0.0.1","remote_port":5600,` +
	`"tp_size":1,"dcp_size":1,"pp_size":1,"remote_num_tokens":40,"remote_blocks_expiry_time":12345.6,"remote_registration_generation":1,"transfer_mode":"pull"}`

func TestReadHandBack(t *testing.T) {
	p := Profile{Name: "mine", Connector: NIXLPull}.WithDefaults()
	known := func(host string) bool { return host == "10.0.0.1" }
	tokens, err := p.ReadHandBack([]byte(keptBy), known)
	require.NoError(t, err)
	require.Equal(t, 40, tokens)
	for change, says := range map[string]string{
		`"remote_num_tokens":40|"remote_num_tokens":0`:                                      "how many tokens",
		`"remote_num_tokens":40|"remote_num_tokens":-1`:                                     "how many tokens",
		`"remote_num_tokens":40|"remote_num_tokens":"40"`:                                   "how many tokens",
		`"remote_num_tokens":40|"remote_num_tokens":99999999999999999999`:                   "how many tokens",
		`"do_remote_decode":true|"do_remote_decode":false`:                                  "whose KV",
		`"do_remote_prefill":false|"do_remote_prefill":true`:                                "whose KV",
		`"remote_request_id":"cmpl-x",|`:                                                    "whose KV",
		`[[1,2,3]]|[[]]`:                                                                    "remote_block_ids is empty",
		`"remote_block_ids":[[1,2,3]]|"remote_block_ids":"a"`:                               "remote_block_ids",
		`"remote_port":5600|"remote_port":0`:                                                "remote_port",
		`10.0.0.1|10.0.0.9`:                                                                 "10.0.0.9",
		`"transfer_mode":"pull"|"transfer_mode":"push"`:                                     "NixlPushConnector",
		`"tp_size":1|"tp_size":tru`:                                                         "not JSON",
		`"tp_size":1|"tp_size":[1,,]`:                                                       "not JSON",
		`"pull"}|"pull"]`:                                                                   "not JSON",
		`"pull"}|"pull","x":"\xff"}`:                                                        "not JSON",
		`{"do_remote_prefill"|[{"do_remote_prefill"`:                                        "not an object",
		`"remote_engine_id":"e"|"remote_engine_id":` + `"` + strings.Repeat("e", 600) + `"`: "remote_engine_id",
	} {
		from, to, _ := strings.Cut(change, "|")
		require.Contains(t, keptBy, from)
		_, err := p.ReadHandBack([]byte(strings.Replace(keptBy, from, to, 1)), known)
		require.ErrorContains(t, err, says, change)
	}
}

// The prefill request has it in the place of the usual parameters, and the decode request never has it.
func TestAPrefillEngineIsToldWhatToFetch(t *testing.T) {
	p := Profile{Name: "mine", Connector: NIXLPull}.WithDefaults()
	b, err := ScanFor(Completions, []byte(`{"prompt":[1,2,3],"max_tokens":9}`), 0)
	require.NoError(t, err)
	leg := &Patch{Fetch: []byte(keptBy)}
	join := func(segments [][]byte) (all string) {
		for _, s := range segments {
			all += string(s)
		}
		return all
	}
	require.Contains(t, join(p.ProbeBody(&b, Completions, leg, nil, nil)), `"kv_transfer_params":`+keptBy)
	require.NotContains(t, join(p.DecodeBody(&b, Completions, leg, []byte(`{"do_remote_prefill":true}`), "", true, nil)), "cmpl-x")
}
