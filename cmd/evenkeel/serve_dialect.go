package main

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"os"
	"reflect"
	"strconv"
	"strings"
	"time"

	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

// exampleProxyFlags has the flags of vllm-ascend's example proxy, and flags for settings of engines
// that the example proxy lacks. A flag that was not given has its zero value, by which usedFlags
// recognises it.
type exampleProxyFlags struct {
	Host           string   `group:"ascend" placeholder:"ADDR" help:"Listen at this address (default: localhost)."`
	Port           *int     `group:"ascend" placeholder:"PORT" help:"Listen at this port (default: 8000)."`
	PrefillerHosts []string `group:"ascend" sep:"none" aliases:"prefiller-host" placeholder:"HOST ..." help:"These are the hosts of the prefill engines (default: localhost)."`
	PrefillerPorts []string `group:"ascend" sep:"none" aliases:"prefiller-port" placeholder:"PORT ..." help:"These are their ports, one for each host (default: 8001)."`
	DecoderHosts   []string `group:"ascend" sep:"none" aliases:"decoder-host" placeholder:"HOST ..." help:"These are the hosts of the decode engines, each a rank of one barrier group (default: localhost)."`
	DecoderPorts   []string `group:"ascend" sep:"none" aliases:"decoder-port" placeholder:"PORT ..." help:"These are their ports, one for each host (default: 8002)."`
	MaxRetries     *int     `group:"ascend" placeholder:"N" help:"Try a request at most this many times in all (default: 3)."`
	RetryDelay     *float64 `group:"ascend" placeholder:"SECONDS" help:"Wait this long before the first retry (default: 0.001)."`

	Workers int `group:"ascend" hidden:""` // ignored, because it is a setting of uvicorn, the web server of the example proxy
	// MaxWaitingRetries is ignored, because evenkeel checks an engine that is down as long as the
	// engine is listed.
	MaxWaitingRetries    int     `group:"ascend" hidden:""`
	WaitingRetryInterval float64 `group:"ascend" hidden:""`

	AggregatedHosts []string `group:"engines" sep:"none" aliases:"aggregated-host" placeholder:"HOST ..." help:"These are the hosts of engines that prefill and decode, each a rank of one barrier group, or a group of its own if it has several ranks. If only these are given, there is no prefill engine and no decode engine."`
	AggregatedPorts []string `group:"engines" sep:"none" aliases:"aggregated-port" placeholder:"PORT ..." help:"These are their ports, one for each host (default: 8003)."`

	Slots                      *int   `group:"engines" placeholder:"B" help:"A decode or aggregated rank runs this many requests at once, its --max-num-seqs (default: 32, with a warning)."`
	Connector                  string `group:"engines" placeholder:"NAME" help:"The engines have this KV connector: ascend-mooncake-v1, ascend-layerwise, nixl-pull, nixl-push, sglang, vllm-mooncake or opaque (default: ascend-mooncake-v1). Aggregated engines have no connector, unless this flag says sglang."`
	Metaserver                 string `group:"engines" placeholder:"HOST:PORT" help:"With ascend-layerwise, decode engines call this address, and must be able to reach it (default: --host, and --port + 1)."`
	PrefillDataParallelSize    int    `group:"engines" placeholder:"N" help:"Each prefill address has this many DP ranks, and a header chooses one (default: one rank, without a header)."`
	DecodeDataParallelSize     int    `group:"engines" placeholder:"N" help:"Each decode address has this many DP ranks, and a header chooses one (default: one rank, without a header)."`
	AggregatedDataParallelSize int    `group:"engines" placeholder:"N" help:"Each aggregated address has this many DP ranks, and a header chooses one (default: one rank, without a header)."`
}

// engineKeyEnv is the environment variable from which vllm-ascend's proxy takes the engines' API
// key.
const engineKeyEnv = "OPENAI_API_KEY"

// asConfig returns the config that the flags describe. It is not validated yet. asConfig also
// records the flags in it, so that errors of the validation name the flag.
func (d *exampleProxyFlags) asConfig() (*config.Config, error) {
	cfg := config.Default()
	host, port := cmp.Or(d.Host, "localhost"), 8000
	if d.Port != nil {
		port = *d.Port
	}
	if problem := hostProblem(host); problem != "" {
		return nil, usageError{fmt.Errorf("--host: %q %s", host, problem)}
	}
	if port < 0 || port > 65535 {
		return nil, usageError{fmt.Errorf("--port: %d is no port; write one from 1 to 65535, or 0 for any that is free", port)}
	}
	if d.Slots != nil && *d.Slots == 0 { // in a config, 0 means the default
		return nil, usageError{errors.New("--slots: a rank with 0 slots runs nothing; write the engines' --max-num-seqs")}
	}
	cfg.Listen = net.JoinHostPort(strings.Trim(host, "[]"), strconv.Itoa(port))
	cfg.Flag("listen", "--host, --port")
	d.setRetries(cfg)
	if err := d.listenForCallbacks(cfg, host, port); err != nil {
		return nil, err
	}
	d.setProfiles(cfg)
	for _, role := range d.engineRoles() {
		if err := d.addEngines(cfg, role); err != nil {
			return nil, err
		}
	}
	return cfg, nil
}

// setRetries sets the number of attempts and the delay before the first retry by --max-retries and
// --retry-delay. Without --retry-delay, the delay is that of the example proxy.
func (d *exampleProxyFlags) setRetries(cfg *config.Config) {
	if d.MaxRetries != nil {
		cfg.Prefill.Retry.Attempts = *d.MaxRetries
		cfg.Flag("prefill.retry.attempts", "--max-retries")
	}
	cfg.Prefill.Retry.Base = time.Millisecond
	if d.RetryDelay != nil {
		cfg.Prefill.Retry.Base = time.Duration(*d.RetryDelay * float64(time.Second))
		if *d.RetryDelay == 0 {
			cfg.Prefill.Retry.Base = 1 // 1 ns, because 0 in the config means the default
		}
		cfg.Flag("prefill.retry.base", "--retry-delay")
	}
}

// setProfiles sets the two default profiles by --connector and the API key: one for prefill and
// decode engines, and one for aggregated engines.
func (d *exampleProxyFlags) setProfiles(cfg *config.Config) {
	profile, aggregated := mooncake.Profile{Connector: d.Connector}, mooncake.Profile{Connector: mooncake.None}
	if d.Connector == mooncake.SGLang { // aggregated engines hand nothing over, but this connector also means that they have SGLang's API
		aggregated.Connector = d.Connector
	}
	if os.Getenv(engineKeyEnv) != "" {
		profile.APIKeyEnv, aggregated.APIKeyEnv = engineKeyEnv, engineKeyEnv
	}
	cfg.Profiles = map[string]mooncake.Profile{config.DefaultProfile: profile, config.DefaultAggregated: aggregated}
	// Errors about the first profile then name the flag. The connector of the second one was chosen
	// above, so it is always valid.
	cfg.Flag("profiles."+config.DefaultProfile, "--connector")
}

// engineFlags are the flags that list the engines of one role.
type engineFlags struct {
	role         string
	flagPrefix   string // the flags are --PREFIX-hosts and --PREFIX-ports; for two roles, the example proxy has other names
	hosts, ports []string
	defaultPort  int // the port of an engine if ports is empty
	ranks        int // the number of DP ranks behind one address
}

// engineRoles returns the roles of which the config gets engines, each with the flags that list
// them. Aggregated engines, which prefill and decode, are in the result only if the flags list
// some, and alone if the flags list no others. In all other cases prefill and decode are both in
// the result, because they work in pairs: a role of which the flags list no engine gets one on this
// machine, at its default port.
func (d *exampleProxyFlags) engineRoles() []engineFlags {
	all := []engineFlags{
		{"prefill", "prefiller", d.PrefillerHosts, d.PrefillerPorts, 8001, d.PrefillDataParallelSize},
		{"decode", "decoder", d.DecoderHosts, d.DecoderPorts, 8002, d.DecodeDataParallelSize},
		{"aggregated", "aggregated", d.AggregatedHosts, d.AggregatedPorts, 8003, d.AggregatedDataParallelSize},
	}
	pair, aggregated := all[:2], all[2:]
	pairIsGiven := pair[0].isGiven() || pair[1].isGiven()
	switch {
	case !aggregated[0].isGiven(): // also if no flag is given
		return pair
	case !pairIsGiven:
		return aggregated
	}
	return all
}

// isGiven says whether the user has given a flag that lists engines of this role.
func (l *engineFlags) isGiven() bool { return len(l.hosts)+len(l.ports) > 0 }

// addEngines adds the engines that the flags list for a role to the config, and records the flags
// for error messages. The flags for hosts and ports have the names that they have in vllm-ascend's
// proxy (flagPrefix: prefiller, decoder). The flag for the number of ranks is evenkeel's own, and
// has the name of the role.
func (d *exampleProxyFlags) addEngines(cfg *config.Config, l engineFlags) error {
	engines, err := parseEngineList(l.flagPrefix, l.hosts, l.ports, l.defaultPort)
	if err != nil {
		return err
	}
	cfg.Flag("engines."+l.role, fmt.Sprintf("--%s-hosts, --%[1]s-ports", l.flagPrefix))
	for i := range engines {
		if d.Slots != nil && l.role != "prefill" { // a prefill engine has no slots
			engines[i].Slots = *d.Slots
			cfg.Flag(fmt.Sprintf("engines.%s[%d].slots", l.role, i), "--slots")
		}
		engines[i].Ranks = l.ranks
		cfg.Flag(fmt.Sprintf("engines.%s[%d].ranks", l.role, i), fmt.Sprintf("--%s-data-parallel-size", l.role))
	}
	switch l.role {
	case "prefill":
		cfg.Engines.Prefill = engines
	case "decode":
		cfg.Engines.Decode = engines
	default:
		cfg.Engines.Aggregated = engines
	}
	return nil
}

// listenForCallbacks sets the address at which the proxy receives callbacks of decode engines, if
// the connector has callbacks. The default is the port after the port for clients, although
// vllm-ascend's layerwise example uses one port for both.
func (d *exampleProxyFlags) listenForCallbacks(cfg *config.Config, host string, port int) error {
	switch bare := strings.Trim(host, "[]"); {
	case d.Connector != mooncake.AscendLayerwise && d.Metaserver != "":
		return usageError{fmt.Errorf("--metaserver: only engines with --connector %s call back; remove it", mooncake.AscendLayerwise)}
	case d.Connector != mooncake.AscendLayerwise: // this connector has no callbacks
	case d.Metaserver != "":
		cfg.Bind.Listen = d.Metaserver
		cfg.Flag("bind.listen", "--metaserver")
	case config.Wildcard(bare): // the proxy listens at all addresses, of which decode engines need one
		return usageError{fmt.Errorf("--host: %q is no host that decode engines can call back; write --metaserver HOST:PORT with an address of "+
			"this machine that they reach", host)}
	default:
		if port > 0 { // 0 means any free port, so callbacks get any free port, too
			port++
		}
		cfg.Bind.Listen = net.JoinHostPort(bare, strconv.Itoa(port))
		cfg.Flag("bind.listen", "--host, --port")
	}
	return nil
}

// parseEngineList returns one engine per host and port, which the flags --SIDE-hosts and
// --SIDE-ports list in the same order.
func parseEngineList(side string, hosts, ports []string, defaultPort int) ([]config.Engine, error) {
	for _, host := range hosts {
		if problem := hostProblem(host); problem != "" {
			return nil, usageError{fmt.Errorf("--%s-hosts: %q %s", side, host, problem)}
		}
	}
	for _, port := range ports {
		if problem := portProblem(port); problem != "" {
			return nil, usageError{fmt.Errorf("--%s-ports: %q %s", side, port, problem)}
		}
	}
	describeLength := func(list []string) string {
		if len(list) == 0 {
			return "is not given, which is 1"
		}
		return fmt.Sprintf("has %d", len(list))
	}
	// The text must be made before the lists get their defaults.
	lengths := fmt.Sprintf("--%s-hosts %s, --%s-ports %s", side, describeLength(hosts), side, describeLength(ports))
	if len(hosts) == 0 {
		hosts = []string{"localhost"}
	}
	if len(ports) == 0 {
		ports = []string{strconv.Itoa(defaultPort)}
	}
	if len(hosts) != len(ports) {
		return nil, usageError{fmt.Errorf("%s; write one port for each host, in the same order", lengths)}
	}
	list := make([]config.Engine, len(hosts))
	for i := range hosts {
		list[i].URL = "http://" + net.JoinHostPort(strings.Trim(hosts[i], "[]"), ports[i])
	}
	return list, nil
}

// hostProblem says what is wrong with a host on the command line, and what to write instead; empty:
// the host is valid.
func hostProblem(host string) string {
	problem := config.HostProblem(strings.Trim(host, "[]"))
	switch {
	case problem == "":
		return ""
	case strings.Contains(host, ","):
		return problem + "; separate hosts by spaces"
	}
	return problem + "; write a name or an address alone, and its port with the flag for ports"
}

// portProblem says what is wrong with a port on the command line, and what to write instead; empty:
// the port is valid.
func portProblem(port string) string {
	if strings.Contains(port, ",") {
		return "is a list separated by commas; separate ports by spaces"
	}
	if n, err := strconv.Atoi(port); err != nil || n < 1 || n > 65535 {
		return "is no port; write a number from 1 to 65535"
	}
	return ""
}

// usedFlags returns the flags that the user has given and that cannot be combined with --config.
// Hidden flags can be combined, because they are ignored anyway.
func (d *exampleProxyFlags) usedFlags() (flags []string) {
	given := reflect.ValueOf(*d)
	for _, f := range reflect.VisibleFields(given.Type()) {
		if _, hidden := f.Tag.Lookup("hidden"); !hidden && !given.FieldByIndex(f.Index).IsZero() {
			flags = append(flags, flagName(f))
		}
	}
	return flags
}
