package main

import (
	"strings"
	"testing"
	"time"

	"github.com/alecthomas/kong"
	"github.com/stretchr/testify/require"

	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

// flags parses a command line of serve as run does.
func flags(t *testing.T, text string) *serveCmd {
	t.Helper()
	var cli commands
	parser, err := kong.New(&cli, helpVariables())
	require.NoError(t, err)
	args := strings.Fields(text)
	_, err = parser.Parse(spreadLists(args, listFlags(parser.Model.Node, args)))
	require.NoError(t, err)
	return &cli.Serve
}

func urls(engines []config.Engine) (list []string) {
	for _, e := range engines {
		list = append(list, strings.TrimPrefix(e.URL, "http://"))
	}
	return list
}

// TestCommandLinesOfVLLMAscend are lines as its documents and users have them,
// the name of the script replaced.
func TestCommandLinesOfVLLMAscend(t *testing.T) {
	t.Setenv(engineKeyEnv, "")
	for _, tc := range []struct {
		name, line, listen string
		prefill, decode    []string
	}{
		{
			"none at all", "serve", "localhost:8000",
			[]string{"localhost:8001"}, []string{"localhost:8002"},
		},
		{
			"two and two", "serve --host 127.0.0.1 --port 9000 --prefiller-hosts 127.0.0.1 127.0.0.1 --prefiller-ports 8100 8101 --decoder-hosts " +
				"127.0.0.1 127.0.0.1 --decoder-ports 8200 8201", "127.0.0.1:9000",
			[]string{"127.0.0.1:8100", "127.0.0.1:8101"}, []string{"127.0.0.1:8200", "127.0.0.1:8201"},
		},
		{
			"the last letter left out, as argparse lets them", "serve --host 192.0.0.1 --port 8080 --prefiller-hosts 192.0.0.1 --prefiller-port " +
				"13700 --decoder-host 192.0.0.1 --decoder-ports 13701", "192.0.0.1:8080",
			[]string{"192.0.0.1:13700"}, []string{"192.0.0.1:13701"},
		},
		{
			"lists over several lines of a script, other flags last",
			`serve
			   --prefiller-hosts
			       80.5.9.138
			       80.5.9.138
			   --prefiller-ports
			       30050 30051
			   --decoder-hosts
			       80.5.9.136
			       80.5.9.136
			       80.5.9.137
			       80.5.9.137
			   --decoder-ports
			       30060 30061
			       30060 30061
			   --host 80.5.9.138
			   --port 30088`, "80.5.9.138:30088",
			[]string{"80.5.9.138:30050", "80.5.9.138:30051"},
			[]string{"80.5.9.136:30060", "80.5.9.136:30061", "80.5.9.137:30060", "80.5.9.137:30061"},
		},
		{
			"ports before hosts", "serve --decoder-ports 2 3 --prefiller-ports 1 --decoder-hosts d0 d1 --prefiller-hosts p0", "localhost:8000",
			[]string{"p0:1"}, []string{"d0:2", "d1:3"},
		},
		{
			"everything with =", "serve --host=0.0.0.0 --port=8000 --prefiller-hosts=p0 --prefiller-ports=1 --decoder-hosts=d0 --decoder-hosts=d1 " +
				"--decoder-ports=2 --decoder-ports=3", "0.0.0.0:8000",
			[]string{"p0:1"}, []string{"d0:2", "d1:3"},
		},
		{
			"IPv6, with and without brackets",
			"serve --host :: --prefiller-hosts fd00::1 --prefiller-ports 1 --decoder-hosts [fd00::2] fd00::3 --decoder-ports 2 3", "[::]:8000",
			[]string{"[fd00::1]:1"}, []string{"[fd00::2]:2", "[fd00::3]:3"},
		},
		{
			"hosts without ports take the default port", "serve --prefiller-hosts p0 --decoder-hosts d0", "localhost:8000",
			[]string{"p0:8001"}, []string{"d0:8002"},
		},
		{
			"what only the example proxy has is taken and does nothing", "serve --workers 4 --max-waiting-retries 3 --waiting-retry-interval 2.5 " +
				"--log-level WARNING --prefiller-ports 1 --decoder-ports 2", "localhost:8000",
			[]string{"localhost:1"}, []string{"localhost:2"},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			cfg, err := flags(t, tc.line).loadConfig()
			require.NoError(t, err)
			require.Equal(t, tc.listen, cfg.Listen)
			require.Equal(t, tc.prefill, urls(cfg.Engines.Prefill))
			require.Equal(t, tc.decode, urls(cfg.Engines.Decode))
			for _, e := range cfg.Engines.Decode {
				require.Equal(t, "main", e.Group, "every decoder is a rank of one barrier group")
				require.Equal(t, config.BarrierDP, e.Barrier)
				require.Zero(t, e.Ranks)
			}
			require.Equal(t, mooncake.AscendMooncakeV1, cfg.Profiles[config.DefaultProfile].Connector)
			require.Equal(t, 3, cfg.Prefill.Retry.Attempts)
			require.Equal(t, time.Millisecond, cfg.Prefill.Retry.Base)
		})
	}
}

func TestOtherFlagsOfServe(t *testing.T) {
	t.Setenv(engineKeyEnv, "secret")
	cfg, err := flags(t, "serve --max-retries 5 --retry-delay 0.5 --slots 48 --policy jsq-kv --admin 127.0.0.1:9191 --connector nixl-pull "+
		"--decode-data-parallel-size 8"+
		" --prefill-data-parallel-size 2 --request-log - --log-level CRITICAL --no-self-test").loadConfig()
	require.NoError(t, err)
	require.Equal(t, 5, cfg.Prefill.Retry.Attempts)
	require.Equal(t, 500*time.Millisecond, cfg.Prefill.Retry.Base)
	require.Equal(t, 48, cfg.Engines.Decode[0].Slots)
	require.Equal(t, 8, cfg.Engines.Decode[0].Ranks)
	require.Equal(t, 2, cfg.Engines.Prefill[0].Ranks)
	require.Equal(t, "jsq-kv", cfg.Dispatch.Policy)
	require.Equal(t, "127.0.0.1:9191", cfg.Admin.Listen)
	require.Equal(t, mooncake.NIXLPull, cfg.Profiles[config.DefaultProfile].Connector)
	require.Equal(t, engineKeyEnv, cfg.Profiles[config.DefaultProfile].APIKeyEnv, "as the example proxy does")
	require.Equal(t, "-", cfg.Log.Requests)
	require.Equal(t, "error", cfg.Log.Level)
	require.False(t, cfg.SelfTest)

	cfg, err = flags(t, "serve --retry-delay 0").loadConfig()
	require.NoError(t, err, "no backoff at all can be asked for")
	require.Less(t, cfg.Prefill.Retry.Base, time.Microsecond)
}

func TestEnginesThatPrefillAndDecodeAreListedAlone(t *testing.T) {
	t.Setenv(engineKeyEnv, "secret")
	cmd := flags(t, "serve --aggregated-hosts a0 a1 --aggregated-ports 8000 8000 --aggregated-data-parallel-size 8 --slots 64")
	cfg, err := cmd.loadConfig()
	require.NoError(t, err)
	require.Empty(t, cfg.Engines.Prefill)
	require.Empty(t, cfg.Engines.Decode)
	require.Empty(t, cfg.Doubts())
	require.Equal(t, []string{"a0:8000", "a1:8000"}, urls(cfg.Engines.Aggregated))
	for _, e := range cfg.Engines.Aggregated {
		require.Equal(t, 64, e.Slots)
		require.Equal(t, 8, e.Ranks)
		require.Equal(t, strings.TrimPrefix(e.URL, "http://"), e.Group)
	}
	p := cfg.Profiles[config.DefaultAggregated]
	require.Equal(t, mooncake.None, p.Connector)
	require.Equal(t, engineKeyEnv, p.APIKeyEnv)

	cfg, err = flags(t, "serve --aggregated-hosts a0 --decoder-hosts d0 --connector sglang").loadConfig()
	require.NoError(t, err)
	require.Equal(t, []string{"localhost:8001"}, urls(cfg.Engines.Prefill))
	require.Equal(t, []string{"d0:8002"}, urls(cfg.Engines.Decode))
	require.Equal(t, []string{"a0:8003"}, urls(cfg.Engines.Aggregated))
	require.Equal(t, mooncake.SGLang, cfg.Profiles[config.DefaultAggregated].Connector)
}

func TestServeRefuses(t *testing.T) {
	file := write(t, "listen: \":0\"\nself_test: false\n")
	for _, tc := range []struct {
		name, line string
		status     int
		says       []string
	}{
		{"lists of different length", "--prefiller-hosts a b --prefiller-ports 1", 2, []string{"--prefiller-hosts has 2, --prefiller-ports has 1", "one port for each host"}},
		{"more ports than hosts", "--decoder-hosts a --decoder-ports 1 2 3", 2, []string{"--decoder-hosts has 1, --decoder-ports has 3"}},
		{"hosts without their ports", "--decoder-hosts a b", 2, []string{"--decoder-hosts has 2, --decoder-ports is not given, which is 1"}},
		{"a port that is none", "--decoder-ports 0", 2, []string{"--decoder-ports: \"0\" is no port", "1 to 65535"}},
		{"aggregated hosts without their ports", "--aggregated-hosts a b", 2, []string{"--aggregated-hosts has 2, --aggregated-ports is not given, which is 1"}},
		{"prefill engines without a connector", "--connector none", 2, []string{"list it under engines.aggregated"}},
		{"an engine listed twice", "--decoder-hosts a a --decoder-ports 1 1", 2, []string{"--decoder-hosts, --decoder-ports: engines.decode[1].url: a:1 is listed twice"}},
		{"an unknown policy", "--policy fastest", 2, []string{"--policy: dispatch.policy: unknown policy \"fastest\"; there are br0"}},
		{"an admin listener for all", "--admin 0.0.0.0:9090", 2, []string{"--admin: admin.listen", "set admin.token_file"}},
		{"no attempts", "--max-retries 0", 2, []string{"--max-retries: prefill.retry.attempts: 0; at least 1"}},
		{"a negative delay", "--retry-delay=-1", 2, []string{"--retry-delay: prefill.retry.base"}},
		{"negative slots", "--slots=-1", 2, []string{"--slots: engines.decode[0].slots"}},
		{"a level nobody knows", "--log-level trace", 2, []string{"--log-level: log.level: \"trace\""}},
		{"a wildcard that decode engines are to call", "--connector ascend-layerwise --host 0.0.0.0", 2, []string{"--host: \"0.0.0.0\" is no host that decode engines can call back; write --metaserver HOST:PORT"}},
		{"another wildcard", "--connector ascend-layerwise --metaserver :8010", 2, []string{"--metaserver: bind.listen", "no host that decode engines can call"}},
		{"loopback for decode engines elsewhere", "--connector ascend-layerwise --decoder-hosts d1 --decoder-ports 1", 2, []string{"--host, --port: bind.listen: \"localhost\" is the decode engine itself for d1"}},
		{"callbacks that nobody makes", "--metaserver 127.0.0.1:1", 2, []string{"--metaserver: only engines with --connector ascend-layerwise call back"}},
		{"a metaserver at the clients' address", "--connector ascend-layerwise --metaserver localhost:8000", 2, []string{"--metaserver: bind.listen", "an address of their own"}},
		{"an unknown connector", "--connector lmcache", 2, []string{"--connector: ", "use one of"}},
		{"a file and its replacement", "--config " + file + " --port 9000 --decoder-hosts a --max-retries 3", 2, []string{"--config does not go with --port, --decoder-hosts, --max-retries; write their values into " + file}},
		{"a file that is not there", "--config none.yaml", 1, []string{"none.yaml"}},
		{"a file that is wrong", "--config " + write(t, "pool: {size: 0}"), 1, []string{"evenkeel.yaml:1:14: pool.size"}},
		{"a file and a wrong flag", "--config " + file + " --policy fastest", 1, []string{"--policy: dispatch.policy"}},
		{"a token file that is not there", "--config " + write(t, "admin: {listen: \":0\", token_file: none}\nlisten: \":0\""), 1, []string{"admin.token_file", "none"}},
		{"a keys file that is not there", "--config " + write(t, "keys_file: none.keys"), 1, []string{"none.keys"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			status, out, errs := line(append([]string{"serve"}, strings.Fields(tc.line)...)...)
			require.Equal(t, tc.status, status, errs)
			require.Empty(t, out)
			for _, want := range tc.says {
				require.Contains(t, errs, want)
			}
		})
	}
}

// The flags of vllm-ascend's layerwise example, as its users type them.
func TestServeInPlaceOfTheLayerwiseExample(t *testing.T) {
	for _, tc := range []struct{ line, listen string }{
		{"--host 10.0.0.2 --port 9000 --prefiller-hosts 10.0.0.3 --prefiller-ports 8100 --decoder-hosts 10.0.0.4 --decoder-ports 8200 --max-retries 2 --retry-delay 0.1", "10.0.0.2:9001"},
		{"", "localhost:8001"},
		{"--host ::1", "[::1]:8001"},
		{"--host localhost --port 0", "localhost:0"},
		{"--host 0.0.0.0 --metaserver 10.0.0.2:8010 --decoder-hosts d1 --decoder-ports 1", "10.0.0.2:8010"},
	} {
		cfg, err := flags(t, "serve --connector ascend-layerwise "+tc.line).loadConfig()
		require.NoError(t, err, tc.line)
		require.Equal(t, tc.listen, cfg.Bind.Listen)
		require.True(t, cfg.OnlyEarlyBinding())
	}
	for _, connector := range []string{"sglang", "nixl-push"} {
		cfg, err := flags(t, "serve --connector "+connector).loadConfig()
		require.NoError(t, err)
		require.Empty(t, cfg.Bind.Listen)
		require.Equal(t, connector == "sglang", cfg.OnlyEarlyBinding())
	}
}

func TestFlagsThatGoWithAFile(t *testing.T) {
	file := write(t, "listen: \":8123\"\ndispatch: {policy: br0}\nlog: {level: warn}\n")
	cfg, err := flags(t,
		"serve --config "+file+" --policy jsq --admin 127.0.0.1:1 --request-log x.jsonl --log-level info --no-self-test").loadConfig()
	require.NoError(t, err)
	require.Equal(t, ":8123", cfg.Listen)
	require.Equal(t, "jsq", cfg.Dispatch.Policy)
	require.Equal(t, "127.0.0.1:1", cfg.Admin.Listen)
	require.Equal(t, "x.jsonl", cfg.Log.Requests)
	require.Equal(t, "info", cfg.Log.Level)
	require.False(t, cfg.SelfTest)

	cfg, err = flags(t, "serve -c "+file).loadConfig()
	require.NoError(t, err)
	require.True(t, cfg.SelfTest)
	require.Equal(t, "warn", cfg.Log.Level)
}
