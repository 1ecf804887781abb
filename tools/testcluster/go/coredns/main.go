// CoreDNS with only the plug-ins that the test cluster's Corefile names.
//
// The stock binary compiles every cloud provider's client, which is most of its build time. The order
// below is the order in which a query passes through the plug-ins.
package main

import (
	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"

	_ "github.com/coredns/coredns/plugin/bind"
	_ "github.com/coredns/coredns/plugin/cache"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/health"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/loop"
	_ "github.com/coredns/coredns/plugin/ready"
	_ "github.com/coredns/coredns/plugin/template"
)

func main() {
	dnsserver.Directives = []string{
		"bind", "health", "ready", "errors", "cache", "template", "loop", "kubernetes",
	}
	coremain.Run()
}
